# Two storage classes, which sky/volumes/*.yaml and sky/finetune.yaml name:
#   csi-mounted-fs-path-sc   ReadWriteMany directories of the shared filesystem; installed here
#   compute-csi-default-sc   ReadWriteOnce network SSDs; in every cluster from the start

locals {
  filesystem_id   = var.existing_filesystem_id != null ? var.existing_filesystem_id : nebius_compute_v1_filesystem.shared[0].id
  storage_classes = { shared = "csi-mounted-fs-path-sc", network = "compute-csi-default-sc" }
}

resource "nebius_compute_v1_filesystem" "shared" {
  count = var.existing_filesystem_id == null ? 1 : 0

  parent_id        = var.project_id
  name             = "${var.name}-shared"
  labels           = local.labels
  type             = "NETWORK_SSD"
  size_gibibytes   = var.shared_filesystem_gib
  block_size_bytes = 4096
  forbid_deletion  = var.protect_filesystem
}

resource "helm_release" "shared_filesystem_csi" {
  name      = "csi-mounted-fs-path"
  chart     = "oci://cr.eu-north1.nebius.cloud/mk8s/helm/csi-mounted-fs-path"
  version   = "0.1.5"
  namespace = "kube-system"
  atomic    = true
  set       = [{ name = "dataDir", value = "${local.mount_path}/volumes/" }]

  depends_on = [nebius_mk8s_v1_node_group.gpu, nebius_mk8s_v1_node_group.system]
}
