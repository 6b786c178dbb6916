# terraform test: what would be created, without an account. Providers are mocked; computed values are invented.

mock_provider "nebius" {
  mock_resource "nebius_mk8s_v1_cluster" {
    defaults = {
      status = { control_plane = {
        auth      = { cluster_ca_certificate = "PEM" }
        endpoints = { public_endpoint = "https://203.0.113.1:443", private_endpoint = "https://10.0.0.1:443" }
      } }
    }
  }
  mock_resource "nebius_registry_v1_registry" {
    defaults = { id = "registry-e00abc", status = { registry_fqdn = "cr.eu-north1.nebius.cloud" } }
  }
  mock_resource "nebius_compute_v1_filesystem" {
    defaults = { id = "computefilesystem-e00new" }
  }
}

mock_provider "helm" {}

variables {
  tenant_id         = "tenant-e00abc"
  project_id        = "project-e00abc"
  region            = "eu-north1"
  subnet_id         = "vpcsubnet-e00abc"
  infiniband_fabric = "fabric-3"
  api_allowed_cidrs = ["203.0.113.7/32"]
  ssh_public_key    = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJ1aWx0LWZvci1hLXRlc3Qtb25seS0wMDAwMDAw test"
  grafana_password  = "a-long-password"
}

run "two_nodes_of_eight_h100_on_one_fabric" {
  assert {
    condition     = nebius_mk8s_v1_node_group.gpu.fixed_node_count == 2 && output.gpus == 16
    error_message = "not 2 x 8 GPUs"
  }
  assert {
    condition     = nebius_mk8s_v1_node_group.gpu.template.resources == { platform = "gpu-h100-sxm", preset = "8gpu-128vcpu-1600gb" }
    error_message = "not H100 nodes"
  }
  assert {
    condition     = nebius_mk8s_v1_node_group.gpu.template.gpu_cluster.id == nebius_compute_v1_gpu_cluster.this[0].id
    error_message = "the nodes are not in the InfiniBand cluster"
  }
  assert {
    condition     = nebius_compute_v1_gpu_cluster.this[0].infiniband_fabric == "fabric-3"
    error_message = "another fabric"
  }
}

run "all_nodes_mount_the_filesystem_and_none_has_a_public_address" {
  assert {
    condition = alltrue([for group in [nebius_mk8s_v1_node_group.gpu, nebius_mk8s_v1_node_group.system] :
      group.template.filesystems[0].existing_filesystem.id == output.filesystem_id &&
    group.template.network_interfaces[0].public_ip_address == null])
    error_message = "a node group lacks the filesystem, or has public addresses"
  }
  assert {
    condition     = strcontains(nonsensitive(nebius_mk8s_v1_node_group.gpu.template.cloud_init_user_data), "[shared, /mnt/shared-filesystem, virtiofs,")
    error_message = "cloud-init does not mount the filesystem by its tag"
  }
  assert {
    condition     = yamldecode(nonsensitive(nebius_mk8s_v1_node_group.gpu.template.cloud_init_user_data)).users[0].ssh_authorized_keys[0] == var.ssh_public_key
    error_message = "the nodes' key is not the given one"
  }
  assert {
    condition     = startswith(helm_release.shared_filesystem_csi.set[0].value, "/mnt/shared-filesystem/")
    error_message = "volumes would be on the boot disk"
  }
}

run "the_filesystem_is_protected_and_big_enough_for_the_volume" {
  assert {
    condition     = nebius_compute_v1_filesystem.shared[0].forbid_deletion && nebius_compute_v1_filesystem.shared[0].size_gibibytes >= 2048
    error_message = "unprotected or too small"
  }
}

run "an_existing_filesystem_is_used_instead_of_a_new_one" {
  variables {
    existing_filesystem_id = "computefilesystem-e00old"
  }
  assert {
    condition     = length(nebius_compute_v1_filesystem.shared) == 0 && nebius_mk8s_v1_node_group.gpu.template.filesystems[0].existing_filesystem.id == "computefilesystem-e00old"
    error_message = "a second filesystem, or not the given one"
  }
}

run "nodes_may_only_pull_images" {
  assert {
    condition     = nebius_iam_v1_access_permit.pull.role == "viewer" && nebius_iam_v1_access_permit.pull.resource_id == nebius_registry_v1_registry.this.id
    error_message = "the nodes' rights are not limited to the registry"
  }
}

run "monitoring_loads_the_rules_the_discovery_and_the_dashboard_of_this_repository" {
  assert {
    condition = length(setsubtract(["FctuneRunStalled", "GpuXid"], flatten([
      for group in yamldecode(helm_release.monitoring[0].values[0]).additionalPrometheusRulesMap.fctune.groups : group.rules[*].alert
    ]))) == 0
    error_message = "rules are missing"
  }
  assert {
    condition     = yamldecode(helm_release.monitoring[0].values[0]).prometheus.prometheusSpec.additionalScrapeConfigs[0].job_name == "fctune"
    error_message = "runs are not discovered"
  }
  assert {
    condition     = jsondecode(yamldecode(helm_release.monitoring[0].values[0]).grafana.dashboards.fctune.runs.json).uid == "fctune-runs"
    error_message = "not the dashboard"
  }
}

run "monitoring_can_be_left_out_and_then_needs_no_password" {
  command = plan
  variables {
    monitoring       = false
    grafana_password = null
  }
  assert {
    condition     = length(helm_release.monitoring) == 0 && output.grafana_command == null
    error_message = "it is installed all the same"
  }
}

run "reserved_capacity_is_never_topped_up_on_demand" {
  variables {
    gpu_reservation_ids = ["capacityblockgroup-e00abc"]
  }
  assert {
    condition     = nebius_mk8s_v1_node_group.gpu.template.reservation_policy.policy == "STRICT"
    error_message = "nodes may start at on-demand prices"
  }
}

run "skypilot_gets_the_context_that_the_kubeconfig_command_creates" {
  assert {
    condition     = strcontains(output.kubeconfig_command, "--context-name ${yamldecode(output.sky_config).kubernetes.allowed_contexts[0]} ")
    error_message = "two context names"
  }
  assert {
    condition     = strcontains(output.dotenv, "export IMAGE=cr.eu-north1.nebius.cloud/e00abc/fctune:latest")
    error_message = "not the registry's image"
  }
}

run "idle_nodes_are_removed_if_asked" {
  variables {
    gpu_nodes_min = 0
  }
  assert {
    condition     = nebius_mk8s_v1_node_group.gpu.autoscaling == { min_node_count = 0, max_node_count = 2 } && nebius_mk8s_v1_node_group.gpu.fixed_node_count == null
    error_message = "not from 0 to 2 nodes"
  }
}

# --- bad input: one variable each ---

run "rejects_a_minimum_that_is_no_less_than_the_maximum" {
  command = plan
  variables {
    gpu_nodes_min = 2
  }
  expect_failures = [var.gpu_nodes_min]
}

run "rejects_h100_where_there_is_none" {
  command = plan
  variables {
    region = "eu-west1"
  }
  expect_failures = [var.gpu_platform]
}

run "rejects_an_unknown_region" {
  command = plan
  variables {
    region = "eu-north9"
  }
  expect_failures = [var.region]
}

run "nodes_with_one_gpu_need_no_fabric" {
  command = plan
  variables {
    gpu_platform      = "gpu-h200-sxm"
    gpu_preset        = "1gpu-16vcpu-200gb"
    infiniband_fabric = null
  }
  assert {
    condition     = output.gpus == 2 && length(nebius_compute_v1_gpu_cluster.this) == 0 && nebius_mk8s_v1_node_group.gpu.template.gpu_cluster == null
    error_message = "nodes with one GPU are on InfiniBand"
  }
}

run "eight_h200_in_another_region" {
  command = plan
  variables {
    region       = "eu-west1"
    gpu_platform = "gpu-h200-sxm"
  }
  assert {
    condition     = output.gpus == 16
    error_message = "not 2 x 8 GPUs"
  }
}

run "rejects_eight_gpus_without_a_fabric" {
  command = plan
  variables {
    infiniband_fabric = null
  }
  expect_failures = [var.infiniband_fabric]
}

run "rejects_presets_that_the_platform_lacks" {
  command = plan
  variables {
    gpu_platform = "gpu-l40s-d"
  }
  expect_failures = [var.gpu_preset]
}

run "rejects_a_preset_in_another_form" {
  command = plan
  variables {
    gpu_preset = "1xH100"
  }
  expect_failures = [var.gpu_preset]
}

run "rejects_an_api_open_to_the_internet" {
  command = plan
  variables {
    api_allowed_cidrs = ["203.0.113.7/32", "0.0.0.0/0"]
  }
  expect_failures = [var.api_allowed_cidrs]
}

run "rejects_a_private_key" {
  command = plan
  variables {
    ssh_public_key = "-----BEGIN OPENSSH PRIVATE KEY-----"
  }
  expect_failures = [var.ssh_public_key]
}

run "rejects_a_filesystem_smaller_than_the_volume" {
  command = plan
  variables {
    shared_filesystem_gib = 1024
  }
  expect_failures = [var.shared_filesystem_gib]
}

run "rejects_half_a_node_and_a_tenant_for_a_project" {
  command = plan
  variables {
    gpu_nodes  = 1.5
    project_id = "tenant-e00abc"
  }
  expect_failures = [var.gpu_nodes, var.project_id]
}

run "rejects_reserved_nodes_that_are_preemptible" {
  command = plan
  variables {
    gpu_reservation_ids = ["capacityblockgroup-e00abc"]
    gpu_preemptible     = true
  }
  expect_failures = [var.gpu_reservation_ids]
}

run "rejects_a_short_password_and_an_alertmanager_file_that_is_missing" {
  command = plan
  variables {
    grafana_password    = "admin"
    alertmanager_config = "missing.yml"
  }
  expect_failures = [var.grafana_password, var.alertmanager_config]
}
