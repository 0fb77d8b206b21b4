"""Extenders as the engine asks them: one after the other filters, then all that want to give points.

An extender that does not answer is passed over if it is ``ignorable``, else it refuses every node. The
format is that of ``k8s.io/kube-scheduler/extender/v1``, whose readers take the names of fields in any case.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from stoker_scheduler.core.model.gangs import Gang
from stoker_scheduler.core.model.requirements import Requirements
from stoker_scheduler.extenders.objects import node_of, pod_of, quantities

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.extenders.config import ExtenderConfig

_log = logging.getLogger(__name__)

MAX_SCORE = 10
"""The points that an extender can give a node. With weight 1 they count as much as the node's whole load."""
R = TypeVar("R", Requirements, Gang, Requirements | Gang)


class ExtenderError(Exception):
    """An extender did not answer, or with an error of its own."""


class Extenders:
    """The extenders of a cluster; without any, nothing is asked."""

    def __init__(self, configs: Sequence[ExtenderConfig] = ()) -> None:
        self._configs = {one.url_prefix.rstrip("/"): one for one in configs}
        self._session: aiohttp.ClientSession | None = None
        self._failing: set[str] = set()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def extend(self, requirements: R) -> R:
        """Return the requirements with the extenders that are to be asked about them."""
        if not self._configs:
            return requirements
        if isinstance(requirements, Gang):
            bundles = tuple(self.extend(bundle) for bundle in requirements.bundles)
            return Gang(bundles, requirements.strategy, requirements.taken)  # type: ignore[return-value]
        if requirements.group_id:
            return requirements
        asked = quantities(requirements.vector)
        names = tuple(name for name, one in self._configs.items() if _is_interested(one, asked))
        return replace(requirements, extenders=names)

    async def ask(
        self, requirements: Requirements, nodes: Iterable[NodeInfo]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return which of ``nodes`` the extenders admit, with what their points gain, and why not others.

        Never fails: what does not answer in time is passed over, or refuses all.
        """
        admitted = {node.node_id: node_of(node) for node in nodes}
        pod, refusals = pod_of(requirements), dict[str, str]()
        for name in requirements.extenders:
            if self._configs[name].filter_verb and admitted:
                failed = await self._filter(name, pod, admitted)
                refusals |= {node_id: f"extender {name}: {why}" for node_id, why in failed.items()}
                admitted = {n: node for n, node in admitted.items() if n not in failed}
        gains = dict.fromkeys(admitted, 0.0)
        scoring = [n for n in requirements.extenders if self._configs[n].prioritize_verb]
        given = await asyncio.gather(*(self._prioritize(n, pod, admitted) for n in scoring))
        for name, scores in zip(scoring, given, strict=True):
            for node_id, score in scores.items():
                if node_id in gains:
                    gains[node_id] += self._configs[name].weight * score / MAX_SCORE
        return gains, refusals

    async def _filter(
        self, name: str, pod: dict[str, Any], nodes: dict[str, dict[str, Any]]
    ) -> dict[str, str]:
        """Return the nodes that an extender refuses, and why."""
        config = self._configs[name]
        try:
            result = await self._call(name, config.filter_verb, pod, nodes)
            if not isinstance(result, dict):
                raise ExtenderError("its answer is no ExtenderFilterResult")
            refused = _refused(result, nodes, config)
            self._failing.discard(name)
            return refused
        except (ExtenderError, TypeError) as error:
            self._failed(name, error)
            return {} if config.ignorable else dict.fromkeys(nodes, str(error))

    async def _prioritize(
        self, name: str, pod: dict[str, Any], nodes: dict[str, dict[str, Any]]
    ) -> dict[str, float]:
        """Return the points that an extender gives; none if it fails: the other nodes are as good."""
        try:
            result = await self._call(name, self._configs[name].prioritize_verb, pod, nodes)
            scores = {_get(one, "Host"): float(_get(one, "Score")) for one in result or ()}
        except (ExtenderError, TypeError, ValueError) as error:
            self._failed(name, error)
            return {}
        return {host: min(max(score, 0.0), MAX_SCORE) for host, score in scores.items()}

    def _failed(self, name: str, error: Exception) -> None:
        level = logging.DEBUG if name in self._failing else logging.WARNING
        self._failing.add(name)
        _log.log(level, "extender %s failed: %s", name, error)

    async def _call(
        self, name: str, verb: str, pod: dict[str, Any], nodes: dict[str, dict[str, Any]]
    ) -> Any:
        config = self._configs[name]
        cached = config.node_cache_capable
        listed = {"apiVersion": "v1", "kind": "NodeList", "items": list(nodes.values())}
        args = {
            "Pod": pod,
            "Nodes": None if cached else listed,
            "NodeNames": list(nodes) if cached else None,
        }
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Content-Type": "application/json"}, json_serialize=_encode
            )
        url = f"{name}/{verb.lstrip('/')}"
        try:
            async with (
                asyncio.timeout(config.timeout_s),
                self._session.post(url, json=args) as reply,
            ):
                body = await reply.read()
                if reply.status != 200:
                    raise ExtenderError(f"it answered {verb} with status {reply.status}")
                return msgspec.json.decode(body)
        except TimeoutError:
            text = f"it did not answer {verb} within its httpTimeout of {config.timeout_s:g} s"
            raise ExtenderError(text) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ExtenderError(f"its answer to {verb} is no JSON ({error})") from None
        except aiohttp.ClientError as error:
            raise ExtenderError(f"it cannot be reached ({error})") from None


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_interested(config: ExtenderConfig, asked: dict[str, str]) -> bool:
    managed = config.managed_resources
    return not managed or any(resource.name in asked for resource in managed)


def _refused(
    result: dict[str, Any], nodes: dict[str, dict[str, Any]], config: ExtenderConfig
) -> dict[str, str]:
    """Return the nodes that a filter's result leaves out, with its reasons."""
    error = _get(result, "Error")
    if error:
        raise ExtenderError(str(error))
    reasons = {**_mapping(result, "FailedNodes"), **_mapping(result, "FailedAndUnresolvableNodes")}
    names = _get(result, "NodeNames")
    if config.node_cache_capable and names is not None:
        passed = dict.fromkeys(names)
    else:
        listed = _get(result, "Nodes")
        items = _get(listed, "items") if listed is not None else None
        passed = dict.fromkeys(_get(_get(one, "metadata"), "name") for one in items or ())
    return {
        node_id: str(reasons.get(node_id) or "it left the node out without a reason")
        for node_id in nodes
        if node_id not in passed
    }


def _mapping(result: dict[str, Any], name: str) -> dict[str, Any]:
    found = _get(result, name)
    return found if isinstance(found, dict) else {}


def _get(value: Any, name: str) -> Any:
    """Return a field, whatever the case of its name; None if it is not there."""
    if not isinstance(value, dict):
        raise ExtenderError(f"its answer has no object where {name} is to be")
    wanted = name.lower()
    return next((found for key, found in value.items() if key.lower() == wanted), None)
