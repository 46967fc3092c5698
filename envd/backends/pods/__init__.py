"""Sandboxes as Kubernetes pods: `api` is the cluster's client, `manifest` defines the pods."""
