"""`python rank_gradients.py STORE_JOB OUT`: the gradient of a warm start's first batch, summed over the ranks."""

from __future__ import annotations

import sys

import torch

from contracts.artifacts import open_artifact
from contracts.chat import ChatTokenizer
from contracts.store import open_store
from trainer import sft
from trainer.config import SftJob, parse_job
from trainer.ranks import join_ranks


def main(text: str, out: str) -> None:
    job = parse_job(text)
    assert isinstance(job, SftJob)
    with join_ranks(job.ranks, job.rank_timeout_s) as ranks:
        store = open_store(job.store)
        chat = ChatTokenizer.from_directory(open_artifact(store, job.tokenizer).directory())
        train, _ = sft._demonstrations(open_artifact(store, job.demonstrations), job, chat.vocabulary_size)
        model = job.model.hf_config(chat.vocabulary_size, chat.end_of_turn)
        run = sft._Run(job, store, model, (), ranks)
        clip = run._parameters.clip_gradients
        run._parameters.clip_gradients = lambda limit: clip(float("inf"))  # type: ignore[method-assign]
        run.step(train)
        if ranks.leads:
            torch.save({buffer.name: buffer.gradient for buffer in run._parameters.buffers}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
