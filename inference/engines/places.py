"""Servers and GPUs that two engines share. Each serves one policy at a time: the engines take it from one another."""

from __future__ import annotations

import re

from contracts.addresses import parse_addresses
from contracts.errors import ConfigError
from inference.engines.config import (
    BuiltinConfig,
    CustomConfig,
    EngineConfig,
    OpenAIConfig,
    RoutedConfig,
    SglangConfig,
    VllmConfig,
)

_GPU, _ALL = "GPU ", "all GPUs of the machine"


def shared_places(one: EngineConfig, other: EngineConfig) -> list[str]:
    """Servers, as host:port, and GPUs that both engines use, sorted. Names are compared as text, none is looked up."""
    ours, theirs = _places(one), _places(other)
    shared = ours & theirs
    for some, all_of_them in ((ours, theirs), (theirs, ours)):
        if _ALL in all_of_them:
            shared |= {each for each in some if each.startswith(_GPU)}
    return sorted(shared)


def _places(config: EngineConfig) -> set[str]:
    if isinstance(config, RoutedConfig):
        return {place for each in config.replicas for place in _places(each)}
    if isinstance(config, BuiltinConfig | CustomConfig):
        return set()
    if isinstance(config, OpenAIConfig | SglangConfig):
        return _servers(config.base_url)
    if isinstance(config, VllmConfig):
        text, gpus = config.base_url, [str(each) for each in config.devices]
    else:
        text, gpus = config.address, config.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return _servers(text) if text is not None else {f"{_GPU}{each}" for each in gpus if each} or {_ALL}


def _servers(text: str) -> set[str]:
    """host:port and path of each; a name that stands for several servers counts as one of them."""
    text = re.sub("//[^/]*@", "//", text)
    try:
        return {each.target + each.path.removesuffix("/v1") for each in parse_addresses(text)}
    except ConfigError:  # `openai` takes URLs of any form
        return {text.rstrip("/")}
