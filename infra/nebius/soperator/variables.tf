# --- account: .envrc sets these as TF_VAR_... ---

variable "region" {
  description = "Region of the project, one with H100."
  type        = string
  validation {
    condition     = var.region == "eu-north1"
    error_message = "region must be eu-north1, where H100 are; for other GPUs also change the workers' platform in main.tf."
  }
}

# --- cluster ---

variable "node_group_version" {
  description = "Version of the node images, as the recipe's terraform.tfvars gives it for this release."
  type        = string
}

variable "infiniband_fabric" {
  description = "Fabric that holds your capacity, as shown in the web console under Limits; it must fit the region and the GPUs."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]+$", var.infiniband_fabric))
    error_message = "infiniband_fabric must name a fabric, such as \"fabric-3\"; your capacity block group or the support names yours."
  }
}

variable "gpu_nodes" {
  description = "Worker nodes with 8 H100 each. All are paid for while they exist, busy or not."
  type        = number
  default     = 2
  validation {
    condition     = var.gpu_nodes >= 0 && var.gpu_nodes <= 100 && floor(var.gpu_nodes) == var.gpu_nodes
    error_message = "gpu_nodes must be a whole number from 0 to 100."
  }
}

variable "gpu_reservation_ids" {
  description = "Capacity block groups to start the workers in. Empty: any of yours, then on demand."
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for id in var.gpu_reservation_ids : startswith(id, "capacityblockgroup-")])
    error_message = "gpu_reservation_ids must start with \"capacityblockgroup-\"."
  }
}

variable "shared_filesystem_gib" {
  description = "Size of /data, for models, data and runs; it can grow later but not shrink."
  type        = number
  default     = 4096
  validation {
    condition     = var.shared_filesystem_gib >= 1024
    error_message = "shared_filesystem_gib must be at least 1024."
  }
}

variable "ssh_public_keys" {
  description = "Keys that may log in to the login node as root."
  type        = list(string)
  validation {
    condition     = length(var.ssh_public_keys) > 0 && alltrue([for key in var.ssh_public_keys : can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+) [A-Za-z0-9+/=]{40,}", key))])
    error_message = "ssh_public_keys must list the contents of public key files: ssh-ed25519 AAAA..."
  }
}
