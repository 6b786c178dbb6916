# terraform test with an empty recipe in place of Nebius': only this folder's own values are checked.

variables {
  tenant_id          = "tenant-e00abc"
  project_id         = "project-e00abc"
  region             = "eu-north1"
  subnet_id          = "vpcsubnet-e00abc"
  node_group_version = "1.0"
  infiniband_fabric  = "fabric-3"
  ssh_public_keys    = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJ1aWx0LWZvci1hLXRlc3Qtb25seS0wMDAwMDAw test"]
}

run "two_workers_of_eight_gpus" {
  assert {
    condition     = output.gpus == 16
    error_message = "not 2 x 8 GPUs"
  }
  assert {
    condition     = module.soperator.slurm_nodeset_workers[0].resource.preset == "8gpu-128vcpu-1600gb" && module.soperator.slurm_nodeset_workers[0].size == 2
    error_message = "not the workers that the recipe gets"
  }
  assert {
    condition     = module.soperator.filestore_jail_submounts[0].spec.forbid_deletion && strcontains(output.dotenv, "FCTUNE_SHARED=${module.soperator.filestore_jail_submounts[0].mount_path}/")
    error_message = "runs would not be on the protected filesystem"
  }
}

run "rejects_regions_without_h100" {
  command = plan
  variables {
    region = "eu-west1"
  }
  expect_failures = [var.region]
}

run "rejects_an_empty_list_of_keys" {
  command = plan
  variables {
    ssh_public_keys = []
  }
  expect_failures = [var.ssh_public_keys]
}
