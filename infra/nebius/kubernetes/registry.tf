# A registry for the image of Dockerfile, and a service account with which nodes pull from it, and can do nothing else.

resource "nebius_registry_v1_registry" "this" {
  parent_id   = var.project_id
  name        = var.name
  labels      = local.labels
  description = "Images of fctune"
}

resource "nebius_iam_v1_service_account" "nodes" {
  parent_id   = var.project_id
  name        = "${var.name}-nodes"
  labels      = local.labels
  description = "Nodes of the cluster ${var.name}: pull images"
}

resource "nebius_iam_v1_group" "nodes" {
  parent_id = var.tenant_id
  name      = "${var.name}-nodes"
  labels    = local.labels
}

resource "nebius_iam_v1_group_membership" "nodes" {
  parent_id = nebius_iam_v1_group.nodes.id
  member_id = nebius_iam_v1_service_account.nodes.id
}

resource "nebius_iam_v1_access_permit" "pull" {
  parent_id   = nebius_iam_v1_group.nodes.id
  resource_id = nebius_registry_v1_registry.this.id
  role        = "viewer"
}
