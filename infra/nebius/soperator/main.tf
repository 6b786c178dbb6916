# Slurm on Kubernetes by Soperator: Nebius' own Terraform recipe, pinned, with the sizes of this project. It makes a
# cluster of its own; use it instead of ../kubernetes, not in it.

terraform {
  required_version = ">= 1.11" # the recipe itself asks for 1.12

  backend "s3" {
    key                         = "fctune/soperator.tfstate"
    use_lockfile                = true
    skip_credentials_validation = true
    skip_region_validation      = true
    skip_requesting_account_id  = true
    skip_metadata_api_check     = true
    skip_s3_checksum            = true
  }
}

module "soperator" {
  # The recipe for Soperator 4.1.6. To update, change both, and compare the recipe's variables.tf and terraform.tfvars.
  source                 = "git::https://github.com/nebius/nebius-solutions-library.git//soperator/installations/example?ref=01e8c67a6182305bf2751a931fc5ee2f642f51a1"
  slurm_operator_version = "4.1.6"

  region         = var.region
  iam_tenant_id  = var.tenant_id
  iam_project_id = var.project_id
  vpc_subnet_id  = var.subnet_id
  company_name   = var.name
  production     = false # true is for clusters that Nebius operates, and asks for its ticket

  node_group_version           = var.node_group_version
  use_preinstalled_gpu_drivers = true

  # The root file system of all nodes, homes included, and /data, where runs go: FCTUNE_SHARED=/data/fctune.
  filestore_controller_spool = { spec = { size_gibibytes = 128, block_size_kibibytes = 4 } }
  filestore_jail             = { spec = { size_gibibytes = 2048, block_size_kibibytes = 4, forbid_deletion = true } }
  filestore_jail_submounts = [{
    name       = "data"
    mount_path = "/data"
    spec       = { size_gibibytes = var.shared_filesystem_gib, block_size_kibibytes = 4, forbid_deletion = true }
  }]

  slurm_nodeset_workers = [{
    name        = "worker"
    size        = var.gpu_nodes
    autoscaling = { enabled = false }
    resource    = { platform = "gpu-h100-sxm", preset = "8gpu-128vcpu-1600gb" }
    boot_disk   = { type = "NETWORK_SSD", size_gibibytes = 512, block_size_kibibytes = 4 }
    gpu_cluster = { infiniband_fabric = var.infiniband_fabric }
    reservation_policy = length(var.gpu_reservation_ids) == 0 ? null : {
      policy          = "STRICT"
      reservation_ids = var.gpu_reservation_ids
    }
    node_local_image_disk = { enabled = false } # Enroot, which Pyxis uses, needs none
    # A network SSD of each node: FCTUNE_NETWORK=/scratch/fctune.
    node_local_jail_submounts = [{
      name            = "scratch"
      mount_path      = "/scratch"
      size_gibibytes  = 1024
      disk_type       = "NETWORK_SSD"
      filesystem_type = "ext4"
    }]
  }]
  # Jobs on as few leaf switches as possible, by the InfiniBand tree.
  slurm_nodesets_partitions = [
    { name = "main", is_all = true, topology = "tree-ib", config = "Default=YES PriorityTier=10 MaxTime=INFINITE State=UP" },
    { name = "hidden", is_all = true, topology = "flat", config = "Default=NO PriorityTier=10 Hidden=YES MaxTime=INFINITE State=UP" },
  ]

  slurm_login_ssh_root_public_keys   = var.ssh_public_keys
  slurm_shared_memory_size_gibibytes = 256
  accounting_enabled                 = false
  active_checks_scope                = "prod_quick"

  # Metrics and logs stay in this project.
  public_o11y_enabled = false
  o11y_iam_tenant_id  = var.tenant_id
  o11y_profile        = ""

  backups_enabled           = "force_disable" # what cannot be made again is pushed elsewhere: docs/clusters.md
  backups_password          = ""
  backups_schedule          = "@daily-random"
  backups_prune_schedule    = "@daily-random"
  backups_retention         = { keepDaily = 1 }
  cleanup_bucket_on_destroy = false
}

output "gpus" {
  description = "GPUs that are paid for."
  value       = 8 * var.gpu_nodes
}

output "login_command" {
  description = "Command that tells the address of the login node; then: ssh root@ADDRESS"
  value       = "terraform state show module.soperator.module.login_script.terraform_data.lb_service_ip"
}

output "dotenv" {
  description = "Lines of .env on the login node: terraform output -raw dotenv"
  value       = <<-EOT
    export FCTUNE_SHARED=/data/fctune
    export FCTUNE_NETWORK=/scratch/fctune
  EOT
}
