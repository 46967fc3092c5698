"""Checks of the store, Dagster's instance and database, containers and clusters."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from pathlib import Path

from contracts.errors import StoreError
from contracts.store import DEFAULT_STORE, LocalStore, Store, local_folder, open_store, readable_errors
from triplane_dagster.doctor.findings import Check, Finding, ask, broken, missing, ok, one_line, trial, version_of

INSTANCE_S = 60.0
STORE_S = 60.0
POSTGRES_S = 5


def checks() -> list[Check]:
    """Checks of services that this machine uses."""
    return [
        Check("store", "artifacts", store, required=True, timeout_s=STORE_S),
        Check("Dagster instance", "runs, their records, the UI", instance, required=True, timeout_s=INSTANCE_S),
        Check("PostgreSQL", "Dagster's records in a deployment", postgres),
        Check("Docker", "deploy/compose.yaml", docker),
        Check("Docker Compose", "deploy/compose.yaml", compose),
        Check("Kubernetes", "clusters; `triplane doctor --kubernetes` tests one", kubernetes),
    ]


def store() -> Finding:
    """Create an object twice, read it, list it, delete it."""
    url = os.environ.get("TRIPLANE_STORE") or DEFAULT_STORE
    try:
        if url.startswith("s3:"):
            return _tried(open_store(url), "conditional writes (If-None-Match) honoured")
        return _local(url)
    except StoreError as error:
        said, _, fix = str(error).partition(": ")
        return broken(one_line(said), one_line(fix) or "see the message")
    except OSError as error:
        return broken(one_line(str(error)), "point TRIPLANE_STORE at a folder on a disk that can be written")


def _local(url: str) -> Finding:
    """Folder for the test object: the store if it exists, else its nearest parent, so that the check creates
    nothing.
    """
    place = local_folder(url).absolute()
    if place.is_dir():
        return _tried(open_store(url), "exclusive links")
    there = next(each for each in (place, *place.parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, so {place} can't be a folder")
    with readable_errors(place), tempfile.TemporaryDirectory(prefix=".triplane-doctor-", dir=there) as folder:
        found = _tried(LocalStore(Path(folder)), "exclusive links")
    return Finding(found.state, found.found.replace(folder, str(place)), found.fix)


def _tried(store: Store, how: str) -> Finding:
    key, data = f"doctor/{uuid.uuid4().hex}", b"written by triplane doctor"
    try:
        created = [store.create(key, data) for _ in range(2)]
        same = store.get(key) == data and store.list("doctor/") != []
    finally:
        store.delete(key)
    if created != [True, False]:
        return broken(f"{store.url} allowed {sum(created)} creations of one object", "use another disk or S3 server")
    if not same:
        return broken(f"{store.url} returned other bytes than were written", "use another disk or S3 server")
    return ok(f"{store.url}: created, read, listed, deleted; {how}")


def instance() -> Finding:
    """Open Dagster's instance as a run would, and read the daemon's heartbeats."""
    said = trial("instance", timeout_s=INSTANCE_S)
    if said.code != 0:
        where = os.environ.get("DAGSTER_HOME")
        fix = f"correct {where}/dagster.yaml, or the services that it names" if where else "correct ./dagster.yaml"
        return broken(said.last_words, fix)
    about = json.loads(said.out.splitlines()[-1])
    alive = (
        ", ".join(about["healthy"]) or "none runs (`triplane ui` starts it; schedules, sensors and queued runs need it)"
    )
    return ok(f"{about['storage']} ({about['place']}); daemon: {alive}")


def postgres() -> Finding:
    """Connect to PostgreSQL if DAGSTER_POSTGRES_* are set."""
    host = os.environ.get("DAGSTER_POSTGRES_HOST")
    try:
        import psycopg2
    except ImportError:
        return missing("no client (psycopg2)", "`pip install -e '.[postgres]'`")
    if not host:
        return missing("DAGSTER_POSTGRES_HOST is not set", "nothing for one machine; docs/deploy.md for a deployment")
    try:
        connection = psycopg2.connect(
            host=host,
            port=os.environ.get("DAGSTER_POSTGRES_PORT", "5432"),
            connect_timeout=POSTGRES_S,
            user=os.environ.get("DAGSTER_POSTGRES_USER"),
            password=os.environ.get("DAGSTER_POSTGRES_PASSWORD"),
            dbname=os.environ.get("DAGSTER_POSTGRES_DB"),
        )
    except psycopg2.OperationalError as error:
        return broken(one_line(str(error)), "start the server, or correct DAGSTER_POSTGRES_*")
    version = connection.server_version
    connection.close()
    return ok(f"version {version // 10000}.{version % 10000} at {host}")


def docker() -> Finding:
    """Test the Docker server, not only its client."""
    try:
        said = ask(["docker", "version", "--format", "{{.Server.Version}}"])
    except FileNotFoundError:
        return missing("no docker in PATH", "`apt-get install docker.io`")
    if said.code != 0:
        return broken(said.last_words, "start its daemon: `systemctl start docker`, or join its group")
    return ok(f"server {said.out.strip()}")


def compose() -> Finding:
    """Ask compose for its version."""
    return version_of(
        "docker", "compose", "version", fix="`apt-get install docker-compose-v2`, or Docker's own packages"
    )


def kubernetes() -> Finding:
    """Ask the cluster for its version."""
    try:
        said = ask(["kubectl", "version", "--output=json", "--request-timeout=4s"])
    except FileNotFoundError:
        return missing("no kubectl in PATH", "`apt-get install kubernetes-client`")
    if said.code != 0:
        return broken(f"kubectl reaches no cluster: {said.last_words}", "point KUBECONFIG at a cluster")
    return ok(f"cluster {json.loads(said.out)['serverVersion']['gitVersion']}")
