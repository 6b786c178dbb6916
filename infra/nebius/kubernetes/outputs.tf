locals {
  # Kubernetes contexts that the nebius CLI creates are named after the cluster.
  context  = "nebius-mk8s-${var.name}"
  registry = "${nebius_registry_v1_registry.this.status.registry_fqdn}/${trimprefix(nebius_registry_v1_registry.this.id, "registry-")}"
}

output "cluster_id" {
  description = "Kubernetes cluster."
  value       = nebius_mk8s_v1_cluster.this.id
}

output "kubeconfig_command" {
  description = "Command that adds the cluster to ~/.kube/config."
  value       = "nebius mk8s cluster get-credentials --id ${nebius_mk8s_v1_cluster.this.id} --external --context-name ${local.context} --force"
}

output "gpus" {
  description = "GPUs that are paid for; with gpu_nodes_min, at most."
  value       = local.gpus_per_node * var.gpu_nodes
}

output "filesystem_id" {
  description = "Shared filesystem; existing_filesystem_id of a later cluster."
  value       = local.filesystem_id
}

output "storage_classes" {
  description = "Storage classes that sky/volumes/shared.yaml and sky/volumes/network.yaml name."
  value       = local.storage_classes
}

output "image" {
  description = "Name under which to push the image of Dockerfile."
  value       = "${local.registry}/fctune"
}

output "sky_config" {
  description = "SkyPilot's configuration: terraform output -raw sky_config > ~/.sky/config.yaml"
  value = yamlencode({
    allowed_clouds = ["kubernetes"]
    kubernetes     = { allowed_contexts = [local.context], provision_timeout = 900 }
  })
}

output "dotenv" {
  description = "Lines of .env: terraform output -raw dotenv >> .env"
  value       = <<-EOT
    export FCTUNE_SHARED=/mnt/shared
    export FCTUNE_NETWORK=/mnt/network
    export IMAGE=${local.registry}/fctune:latest
  EOT
}

output "grafana_command" {
  description = "Command that makes Grafana available at http://127.0.0.1:3000, user admin."
  value       = var.monitoring ? "kubectl --context ${local.context} --namespace monitoring port-forward service/monitoring-grafana 3000:80" : null
}
