"""Sandboxes as Kubernetes pods: `api` speaks to the cluster, `manifest` says what a pod is."""
