"""Creates the buckets named on the command line where they do not exist yet. Endpoint and credentials come from the
AWS_* variables.
"""

from __future__ import annotations

import sys

import boto3
from botocore.exceptions import BotoCoreError, ClientError


def main(names: list[str]) -> int:
    """Exit status 0 when all of them exist."""
    client = boto3.client("s3")
    region = client.meta.region_name
    # AWS wants the region's name, except that of its first region, which is no constraint
    place = {} if region in (None, "us-east-1") else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    for name in names:
        try:
            client.create_bucket(Bucket=name, **place)
        except client.exceptions.BucketAlreadyOwnedByYou:
            print(f"bucket {name} exists", flush=True)
        except (ClientError, BotoCoreError) as error:
            print(f"bucket {name} can't be created at {client.meta.endpoint_url}: {error}", file=sys.stderr)
            return 1
        else:
            print(f"bucket {name} created", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
