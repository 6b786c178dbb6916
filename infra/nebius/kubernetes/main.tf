# Managed Kubernetes with a group of GPU nodes, on one InfiniBand fabric if they have 8 GPUs, and a few CPU nodes for
# everything else.

locals {
  # Platforms by region, as of November 2026.
  gpu_platforms = {
    eu-north1   = ["gpu-h100-sxm", "gpu-h200-sxm", "gpu-l40s-a", "gpu-l40s-d"]
    eu-north2   = ["gpu-h200-sxm"]
    eu-west1    = ["gpu-h200-sxm"]
    me-west1    = ["gpu-b200-sxm-a"]
    uk-south1   = ["gpu-b300-sxm"]
    us-central1 = ["gpu-h200-sxm", "gpu-b200-sxm"]
  }
  gpus_per_node  = try(tonumber(regex("^[0-9]+", var.gpu_preset)), 8)
  has_infiniband = local.gpus_per_node == 8
  labels         = { project = "fctune", cluster = var.name }

  # The file system of each node that the CSI driver makes volumes of.
  mount_tag  = "shared"
  mount_path = "/mnt/shared-filesystem"
  cloud_init = templatefile("${path.module}/cloud-init.yaml.tftpl", {
    mount_tag      = local.mount_tag
    mount_path     = local.mount_path
    ssh_public_key = var.ssh_public_key
  })
  filesystems = [{
    attach_mode         = "READ_WRITE"
    mount_tag           = local.mount_tag
    existing_filesystem = { id = local.filesystem_id }
  }]
}

resource "nebius_mk8s_v1_cluster" "this" {
  parent_id = var.project_id
  name      = var.name
  labels    = local.labels

  control_plane = {
    subnet_id         = var.subnet_id
    version           = var.kubernetes_version
    etcd_cluster_size = 3
    endpoints         = { public_endpoint = { allowed_cidrs = var.api_allowed_cidrs } }
    audit_logs        = {}
  }
}

# Nodes of one GPU cluster are on one fabric; NCCL finds InfiniBand between them only.
resource "nebius_compute_v1_gpu_cluster" "this" {
  count             = local.has_infiniband ? 1 : 0
  parent_id         = var.project_id
  name              = var.name
  labels            = local.labels
  infiniband_fabric = var.infiniband_fabric
}

resource "nebius_mk8s_v1_node_group" "gpu" {
  parent_id        = nebius_mk8s_v1_cluster.this.id
  name             = "${var.name}-gpu"
  labels           = local.labels
  version          = var.kubernetes_version
  fixed_node_count = var.gpu_nodes_min == null ? var.gpu_nodes : null
  autoscaling      = var.gpu_nodes_min == null ? null : { min_node_count = var.gpu_nodes_min, max_node_count = var.gpu_nodes }

  # A new template replaces nodes one by one; an extra GPU node for the time of the change may not be available.
  strategy = { max_surge = { count = 0 }, max_unavailable = { count = 1 } }

  template = {
    metadata             = { labels = { "fctune/role" = "gpu" } }
    resources            = { platform = var.gpu_platform, preset = var.gpu_preset }
    boot_disk            = { type = "NETWORK_SSD", size_gibibytes = var.gpu_boot_disk_gib }
    gpu_cluster          = local.has_infiniband ? { id = nebius_compute_v1_gpu_cluster.this[0].id } : null
    gpu_settings         = { drivers_preset = var.gpu_drivers_preset }
    service_account_id   = nebius_iam_v1_service_account.nodes.id
    filesystems          = local.filesystems
    network_interfaces   = [{ subnet_id = var.subnet_id }] # no public address
    cloud_init_user_data = local.cloud_init
    preemptible          = var.gpu_preemptible ? {} : null
    reservation_policy = length(var.gpu_reservation_ids) == 0 ? null : {
      policy          = "STRICT" # fail rather than pay on-demand prices in addition to a reservation
      reservation_ids = var.gpu_reservation_ids
    }
  }
}

resource "nebius_mk8s_v1_node_group" "system" {
  parent_id        = nebius_mk8s_v1_cluster.this.id
  name             = "${var.name}-system"
  labels           = local.labels
  version          = var.kubernetes_version
  fixed_node_count = var.system_nodes.count

  template = {
    metadata             = { labels = { "fctune/role" = "system" } }
    resources            = { platform = var.system_nodes.platform, preset = var.system_nodes.preset }
    boot_disk            = { type = "NETWORK_SSD", size_gibibytes = 128 }
    service_account_id   = nebius_iam_v1_service_account.nodes.id
    filesystems          = local.filesystems # a pod without a GPU can prepare data on the shared volume
    network_interfaces   = [{ subnet_id = var.subnet_id }]
    cloud_init_user_data = local.cloud_init
  }
}

# Device plugin (nvidia.com/gpu) with DCGM exporter, for node images with drivers; then InfiniBand devices for pods.
resource "nebius_applications_v1alpha1_k8s_release" "device_plugin" {
  parent_id        = var.project_id
  cluster_id       = nebius_mk8s_v1_cluster.this.id
  application_name = "nvidia-device-plugin"
  namespace        = "nvidia-device-plugin"
  product_slug     = "nebius/nvidia-device-plugin"
  set              = { "dcgm-exporter.enabled" = "true" }

  depends_on = [nebius_mk8s_v1_node_group.gpu, nebius_mk8s_v1_node_group.system]
}

resource "nebius_applications_v1alpha1_k8s_release" "network_operator" {
  count            = local.has_infiniband ? 1 : 0
  parent_id        = var.project_id
  cluster_id       = nebius_mk8s_v1_cluster.this.id
  application_name = "network-operator"
  namespace        = "network-operator"
  product_slug     = "nebius/nvidia-network-operator"
  set              = { "operator.ofedDriver.livenessProbe.enabled" = "false" }

  depends_on = [nebius_mk8s_v1_node_group.gpu, nebius_mk8s_v1_node_group.system]
}
