# Prometheus, Alertmanager and Grafana. Rules, run discovery and dashboard are the files of sky/monitoring, which also
# work without Kubernetes; docs/operate.md describes them.

locals {
  monitoring_files = "${path.module}/../../../sky/monitoring"
  on_system_nodes  = { nodeSelector = { "fctune/role" = "system" } }
  network_disk = { volumeClaimTemplate = { spec = {
    storageClassName = local.storage_classes.network
    accessModes      = ["ReadWriteOnce"]
    resources        = { requests = { storage = "${var.metrics_disk_gib}Gi" } }
  } } }
  alertmanager = var.alertmanager_config == null ? {} : { config = yamldecode(file(var.alertmanager_config)) }
}

resource "helm_release" "monitoring" {
  count = var.monitoring ? 1 : 0

  name             = "monitoring"
  repository       = "https://prometheus-community.github.io/helm-charts"
  chart            = "kube-prometheus-stack"
  version          = var.kube_prometheus_stack_version
  namespace        = "monitoring"
  create_namespace = true
  atomic           = true
  timeout          = 900

  values = [yamlencode({
    additionalPrometheusRulesMap = { fctune = yamldecode(file("${local.monitoring_files}/alerts.yml")) }
    prometheus = { prometheusSpec = merge(local.on_system_nodes, {
      retention               = "${var.metrics_retention_days}d"
      storageSpec             = local.network_disk
      additionalScrapeConfigs = yamldecode(file("${local.monitoring_files}/prometheus-kubernetes.yml")).scrape_configs
    }) }
    prometheusOperator = local.on_system_nodes
    kube-state-metrics = local.on_system_nodes
    alertmanager       = merge(local.alertmanager, { alertmanagerSpec = local.on_system_nodes })
    # node-exporter runs on every node; its infiniband collector is on by default.
    grafana = merge(local.on_system_nodes, {
      dashboardProviders = { "dashboardproviders.yaml" = {
        apiVersion = 1
        providers  = [{ name = "fctune", folder = "fctune", type = "file", options = { path = "/var/lib/grafana/dashboards/fctune" } }]
      } }
      dashboards = { fctune = { runs = { json = file("${local.monitoring_files}/dashboard.json") } } }
    })
    # The managed control plane does not expose these.
    kubeControllerManager = { enabled = false }
    kubeEtcd              = { enabled = false }
    kubeScheduler         = { enabled = false }
    kubeProxy             = { enabled = false }
  })]

  set_wo          = [{ name = "grafana.adminPassword", value = var.grafana_password }]
  set_wo_revision = var.grafana_password_revision

  depends_on = [nebius_mk8s_v1_node_group.system, nebius_applications_v1alpha1_k8s_release.device_plugin]
}
