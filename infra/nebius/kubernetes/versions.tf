terraform {
  required_version = ">= 1.11" # use_lockfile of the s3 backend, write-only attributes

  required_providers {
    nebius = {
      source  = "nebius/nebius"
      version = "~> 0.6.52"
    }
    helm = {
      source  = "hashicorp/helm"
      version = "~> 3.1"
    }
  }

  # Bucket, region and endpoint come from TF_CLI_ARGS_init, which .envrc sets; keys from AWS_ACCESS_KEY_ID and
  # AWS_SECRET_ACCESS_KEY. Without a bucket: terraform init -backend=false only validates.
  backend "s3" {
    key                         = "fctune/kubernetes.tfstate"
    use_lockfile                = true
    skip_credentials_validation = true
    skip_region_validation      = true
    skip_requesting_account_id  = true
    skip_metadata_api_check     = true
    skip_s3_checksum            = true
  }
}

# A service account if NB_SA_ID is set (CI), else the token that .envrc takes from the CLI (NEBIUS_IAM_TOKEN).
provider "nebius" {
  service_account = var.use_service_account ? {
    account_id_env       = "NB_SA_ID"
    public_key_id_env    = "NB_AUTHKEY_PUBLIC_ID"
    private_key_file_env = "NB_AUTHKEY_PRIVATE_PATH"
  } : null
}

provider "helm" {
  kubernetes = {
    host                   = nebius_mk8s_v1_cluster.this.status.control_plane.endpoints.public_endpoint
    cluster_ca_certificate = nebius_mk8s_v1_cluster.this.status.control_plane.auth.cluster_ca_certificate
    exec = {
      api_version = "client.authentication.k8s.io/v1beta1"
      command     = "nebius"
      args        = ["mk8s", "v1", "cluster", "get-token", "--format", "json"]
    }
  }
}
