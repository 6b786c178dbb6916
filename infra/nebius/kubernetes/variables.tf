# --- account: .envrc sets these as TF_VAR_... ---

variable "region" {
  description = "Region of the project. A project belongs to one region."
  type        = string
  validation {
    condition     = contains(keys(local.gpu_platforms), var.region)
    error_message = "region must be one of ${join(", ", keys(local.gpu_platforms))}."
  }
}

variable "use_service_account" {
  description = "Authenticate as the service account in NB_SA_ID, NB_AUTHKEY_PUBLIC_ID and NB_AUTHKEY_PRIVATE_PATH."
  type        = bool
  default     = false
}

# --- cluster ---

variable "kubernetes_version" {
  description = "Version as MAJOR.MINOR; null: the service's default."
  type        = string
  default     = null
  validation {
    condition     = var.kubernetes_version == null || can(regex("^1\\.(3[1-9]|[4-9][0-9])$", var.kubernetes_version))
    error_message = "kubernetes_version must be MAJOR.MINOR from 1.31 on, without a patch version, or null."
  }
}

variable "api_allowed_cidrs" {
  description = "Networks that may reach the Kubernetes API from the internet: your office, your VPN, CI."
  type        = list(string)
  validation {
    condition     = length(var.api_allowed_cidrs) > 0 && alltrue([for cidr in var.api_allowed_cidrs : can(cidrhost(cidr, 0))])
    error_message = "api_allowed_cidrs must list at least one network, such as \"203.0.113.7/32\"."
  }
  validation {
    condition     = !contains([for cidr in var.api_allowed_cidrs : split("/", cidr)[1] if can(cidrhost(cidr, 0))], "0")
    error_message = "api_allowed_cidrs must not contain a /0 network, which opens the API to the whole internet."
  }
}

variable "ssh_public_key" {
  description = "Public key of the user fctune on the nodes, which have no public address."
  type        = string
  validation {
    condition     = can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+) [A-Za-z0-9+/=]{40,}", var.ssh_public_key))
    error_message = "ssh_public_key must be the content of a public key file: ssh-ed25519 AAAA..."
  }
}

# --- GPU nodes ---

variable "gpu_platform" {
  description = "Platform of the GPU nodes."
  type        = string
  default     = "gpu-h100-sxm"
  validation {
    condition     = contains(lookup(local.gpu_platforms, var.region, []), var.gpu_platform)
    error_message = "gpu_platform ${var.gpu_platform} is not offered in ${var.region}; there: ${join(", ", lookup(local.gpu_platforms, var.region, []))}."
  }
}

variable "gpu_preset" {
  description = "Size of a GPU node. Only nodes with all 8 GPUs of a host are joined by InfiniBand."
  type        = string
  default     = "8gpu-128vcpu-1600gb"
  validation {
    condition     = can(regex(startswith(var.gpu_platform, "gpu-l40s-") ? "^[124]gpu-[0-9]+vcpu-[0-9]+gb$" : "^[18]gpu-[0-9]+vcpu-[0-9]+gb$", var.gpu_preset))
    error_message = "gpu_preset must name a preset with 1 or 8 GPUs (of L40S: 1, 2 or 4), such as \"1gpu-16vcpu-200gb\" for one H100 or H200; nebius compute platform list shows those of ${var.gpu_platform}."
  }
}

variable "infiniband_fabric" {
  description = "Fabric that holds your capacity, as shown in the web console under Limits; it must fit the region and the GPUs. Null only for nodes with fewer than 8 GPUs, which have no InfiniBand."
  type        = string
  default     = null
  validation {
    condition     = var.infiniband_fabric == null ? !startswith(var.gpu_preset, "8gpu-") : can(regex("^[a-z0-9][a-z0-9-]+$", var.infiniband_fabric))
    error_message = "infiniband_fabric must name a fabric, such as \"fabric-3\"; your capacity block group or the support names yours."
  }
}

variable "gpu_nodes" {
  description = "Number of GPU nodes. All are paid for while they exist, busy or not."
  type        = number
  default     = 2
  validation {
    condition     = var.gpu_nodes >= 0 && var.gpu_nodes <= 64 && floor(var.gpu_nodes) == var.gpu_nodes
    error_message = "gpu_nodes must be a whole number from 0 to 64; the node group of a larger cluster must be split."
  }
}

variable "gpu_nodes_min" {
  description = "Let idle GPU nodes be removed down to this number, and added up to gpu_nodes when pods wait. Null: never."
  type        = number
  default     = null
  validation {
    condition     = var.gpu_nodes_min == null || try(var.gpu_nodes_min >= 0 && var.gpu_nodes_min < var.gpu_nodes && floor(var.gpu_nodes_min) == var.gpu_nodes_min, false)
    error_message = "gpu_nodes_min must be a whole number below gpu_nodes, or null."
  }
}

variable "gpu_drivers_preset" {
  description = "Drivers in the node image: nebius mk8s node-group get-compatibility-matrix lists those of each version."
  type        = string
  default     = "cuda13.0"
  validation {
    condition     = can(regex("^cuda[0-9]+(\\.[0-9]+)?$", var.gpu_drivers_preset))
    error_message = "gpu_drivers_preset must look like \"cuda13.0\"."
  }
}

variable "gpu_reservation_ids" {
  description = "Capacity block groups to start the GPU nodes in. Empty: any of yours, then on demand."
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for id in var.gpu_reservation_ids : startswith(id, "capacityblockgroup-")])
    error_message = "gpu_reservation_ids must start with \"capacityblockgroup-\"."
  }
  validation {
    condition     = length(var.gpu_reservation_ids) == 0 || !var.gpu_preemptible
    error_message = "gpu_reservation_ids cannot be used with gpu_preemptible."
  }
}

variable "gpu_preemptible" {
  description = "Cheaper GPU nodes that may be stopped at any time; runs then need sky jobs launch."
  type        = bool
  default     = false
}

variable "gpu_boot_disk_gib" {
  description = "Boot disk of a GPU node, which also holds container images."
  type        = number
  default     = 512
  validation {
    condition     = var.gpu_boot_disk_gib >= 256
    error_message = "gpu_boot_disk_gib must be at least 256: a CUDA image unpacks to tens of GB, and the kubelet evicts pods at 85 %."
  }
}

# --- other nodes ---

variable "system_nodes" {
  description = "CPU nodes for system pods, Prometheus and Grafana."
  type        = object({ count = number, platform = string, preset = string })
  default     = { count = 2, platform = "cpu-d3", preset = "8vcpu-32gb" }
  validation {
    condition     = var.system_nodes.count >= 1 && startswith(var.system_nodes.platform, "cpu-")
    error_message = "system_nodes needs at least one node of a platform that starts with \"cpu-\"."
  }
}

# --- storage ---

variable "shared_filesystem_gib" {
  description = "Size of the shared filesystem; it can grow later but not shrink. fctune plan tells what a run needs."
  type        = number
  default     = 4096
  validation {
    condition     = var.shared_filesystem_gib >= 2048
    error_message = "shared_filesystem_gib must be at least 2048: sky/volumes/shared.yaml claims 2000 GiB."
  }
}

variable "existing_filesystem_id" {
  description = "Shared filesystem to mount instead of creating one: data that outlives the cluster. See README.md."
  type        = string
  default     = null
  validation {
    condition     = var.existing_filesystem_id == null || can(regex("^computefilesystem-", var.existing_filesystem_id))
    error_message = "existing_filesystem_id must start with \"computefilesystem-\", or be null."
  }
}

variable "protect_filesystem" {
  description = "Refuse to delete the shared filesystem with the cluster."
  type        = bool
  default     = true
}

# --- monitoring ---

variable "monitoring" {
  description = "Install Prometheus, Alertmanager and Grafana with the rules and the dashboard of sky/monitoring."
  type        = bool
  default     = true
}

variable "kube_prometheus_stack_version" {
  description = "Version of the kube-prometheus-stack chart."
  type        = string
  default     = "79.5.0"
}

variable "metrics_retention_days" {
  description = "Days that Prometheus keeps metrics."
  type        = number
  default     = 30
  validation {
    condition     = var.metrics_retention_days >= 1 && var.metrics_retention_days <= 365
    error_message = "metrics_retention_days must be from 1 to 365."
  }
}

variable "metrics_disk_gib" {
  description = "Network SSD of Prometheus."
  type        = number
  default     = 128
}

variable "grafana_password" {
  description = "Password of Grafana's user admin, if there is monitoring; it is not written to the state."
  type        = string
  default     = null
  ephemeral   = true
  validation {
    condition     = !var.monitoring || try(length(var.grafana_password) >= 12, false)
    error_message = "grafana_password must have at least 12 characters: set TF_VAR_grafana_password; create one with: openssl rand -base64 18."
  }
}

variable "grafana_password_revision" {
  description = "Increase it to apply a changed grafana_password, which Terraform cannot compare."
  type        = number
  default     = 1
}

variable "alertmanager_config" {
  description = "Path of an Alertmanager configuration; see sky/monitoring/alertmanager.yml. Null: alerts are shown, not sent."
  type        = string
  default     = null
  validation {
    condition     = var.alertmanager_config == null || can(yamldecode(file(var.alertmanager_config)).route)
    error_message = "alertmanager_config must be the path of a YAML file with a route."
  }
}
