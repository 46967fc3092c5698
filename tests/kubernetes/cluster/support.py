"""What a release needs beside itself on a test cluster: an S3 server, Secrets and experiment files, as objects."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret"}
PLACEMENT = "{steps: {cpu: 0.05, memory: 2Gi}, trainer: {cpu: 0.05, memory: 4Gi}}"
BUCKETS = ("triplane", "triplane-logs")
VOLUME = "triplane-test"
"""Label of a volume, whose value is the namespace that it is for."""
SMALL = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}
"""Resources of a container, of which many fit on a node."""
_S3 = """
import sys, boto3, threading, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("0.0.0.0", 9000)
server.start()
client = boto3.client("s3", endpoint_url="http://127.0.0.1:9000", region_name="us-east-1")
for name in sys.argv[1:]:
    client.create_bucket(Bucket=name)
open("/tmp/ready", "w").close()
threading.Event().wait()
"""


def secret(name: str, values: dict[str, str]) -> dict[str, Any]:
    """A Secret."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


def experiments(files: list[Path]) -> dict[str, Any]:
    """ConfigMap of experiment files, whose pods ask for little."""
    data = {path.name: f"{path.read_text()}\nplacement: {PLACEMENT}\n" for path in files}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "experiments"}, "data": data}


def s3_server(image: str, environment: dict[str, str], node: str) -> list[dict[str, Any]]:
    """A Deployment of moto's S3 server, whose objects are in its memory, and its Service `s3`."""
    labels = {"app": "s3"}
    container = {
        "name": "s3",
        "image": image,
        "command": ["python", "-c", _S3, *BUCKETS],
        # moto takes the first part of a host name for a bucket otherwise
        "env": [
            {"name": name, "value": value}
            for name, value in {**environment, **KEYS, "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"}.items()
        ],
        "ports": [{"containerPort": 9000}],
        "readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
    }
    where = {"kubernetes.io/hostname": node}
    pod = {"containers": [container], "automountServiceAccountToken": False, "nodeSelector": where}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "s3", "labels": labels},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "s3"},
            "spec": {"selector": labels, "ports": [{"port": 9000}]},
        },
    ]


def volume(namespace: str, claim: str, image: str, node: str) -> list[dict[str, Any]]:
    """A volume for a claim, in a folder of a node, and a pod that makes the folder. The folder stays there."""
    name = f"{namespace}-{claim}"
    path = f"/tmp/{name}"
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]
    pod = {
        "containers": [
            {
                "name": "folder",
                "image": image,
                "command": ["true"],
                "volumeMounts": [{"name": "folder", "mountPath": "/folder"}],
            }
        ],
        "volumes": [{"name": "folder", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}],
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "nodeName": node,
    }
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"folder-{claim}"}, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name, "labels": {VOLUME: namespace}},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "10Gi"},
                "claimRef": {"namespace": namespace, "name": claim},
                "persistentVolumeReclaimPolicy": "Retain",
                "local": {"path": path},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
            },
        },
    ]


def postgres_command() -> list[str]:
    """Command of Debian's PostgreSQL, which has no entry point as the official image has."""
    script = (
        "set -e; export PATH=$(echo /usr/lib/postgresql/*/bin):$PATH PGDATA=/tmp/data; "
        'if [ ! -s "$PGDATA/PG_VERSION" ]; then echo "$POSTGRES_PASSWORD" >/tmp/password; '
        'initdb -E UTF8 --locale=C -U "$POSTGRES_USER" -A scram-sha-256 --pwfile=/tmp/password >/dev/null; '
        'postgres --single -j -D "$PGDATA" postgres <<<"CREATE DATABASE $POSTGRES_DB"; '
        'echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"; fi; '
        "exec postgres -D \"$PGDATA\" -c listen_addresses='*' -c unix_socket_directories=/tmp -c fsync=off"
    )
    return ["bash", "-c", script]
