# Variables that both roots have, each through a link to this file: Terraform has no other way to share declarations and
# their checks between roots.

variable "tenant_id" {
  description = "Tenant of the project."
  type        = string
  validation {
    condition     = startswith(var.tenant_id, "tenant-")
    error_message = "tenant_id must start with \"tenant-\"; list yours with: nebius iam tenant list."
  }
}

variable "project_id" {
  description = "Project that owns all resources."
  type        = string
  validation {
    condition     = startswith(var.project_id, "project-")
    error_message = "project_id must start with \"project-\"; list yours with: nebius iam project list."
  }
}

variable "subnet_id" {
  description = "Subnet of all nodes, and of the control plane."
  type        = string
  validation {
    condition     = startswith(var.subnet_id, "vpcsubnet-")
    error_message = "subnet_id must start with \"vpcsubnet-\"; list yours with: nebius vpc subnet list."
  }
}

variable "name" {
  description = "Name of the cluster, and prefix of all other names."
  type        = string
  default     = "fctune"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}[a-z0-9]$", var.name))
    error_message = "name must have 3 to 32 lower-case letters, digits and hyphens, and start with a letter."
  }
}
