"""Trainers as Kubernetes Jobs. Nothing else in the project starts Jobs.

    Launch -> launcher -> manifests -> client --create--> Job train-<key>, headless Service of the same name
                 |<-- watching <----- client <--list----- Job, pods
                 |-- waiting, faults: why pods don't start, why they ended
                 '-- logs -> the store                    messages come by Pipes, through S3

One Job for an action key: its name is the key's, so a second launch adopts the first one's Job. The official client,
`kubernetes`, is imported in `client` alone.
"""
