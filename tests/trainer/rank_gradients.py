"""`python rank_gradients.py STORE_JOB OUT`: the gradient of a warm start's first batch, summed over the ranks."""

from __future__ import annotations

import sys

import torch

from contracts.artifacts import open_artifact
from contracts.store import open_store
from trainer import sft
from trainer.backends.torch import TorchBackend
from trainer.config import SftJob, parse_job
from trainer.demonstrations import read_demonstrations
from trainer.ranks import join_ranks
from trainer.sft_start import read_start


def main(text: str, out: str) -> None:
    job = parse_job(text)
    assert isinstance(job, SftJob)
    with join_ranks(job.ranks, job.rank_timeout_s) as ranks:
        store = open_store(job.store)
        start = read_start(job, store, open_artifact(store, job.tokenizer))
        train, sources, _ = read_demonstrations(job, store, start.model["vocab_size"])
        run = sft._Run(job, store, start, train, sources, (), (), ranks)
        assert isinstance(run._backend, TorchBackend)
        clip = run._backend.parameters.clip_gradients
        run._backend.parameters.clip_gradients = lambda limit: clip(float("inf"))  # type: ignore[method-assign]
        run.step()
        if ranks.leads:
            torch.save({buffer.name: buffer.gradient for buffer in run._backend.parameters.buffers}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
