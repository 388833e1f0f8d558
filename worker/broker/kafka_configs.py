"""Settings of topics and nodes, as far as a principal may see them."""

from collections.abc import Collection, Mapping
from typing import Any

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType


async def topic_configs(client: Any, topics: Collection[str]) -> dict[str, Mapping[str, str]]:
    """Settings by topic; absent ones and those that we may not see are left out. `client` is aiokafka's admin."""
    return await _configs(client, ConfigResourceType.TOPIC, topics)


async def node_config(client: Any, node: str) -> Mapping[str, str]:
    """Settings of a node; empty where we may not see them."""
    return (await _configs(client, ConfigResourceType.BROKER, [node])).get(node, {})


async def _configs(client: Any, kind: ConfigResourceType, names: Collection[str]) -> dict[str, Mapping[str, str]]:
    if not names:
        return {}
    responses = await client.describe_configs([ConfigResource(kind, name) for name in names])
    return {
        name: {entry[0]: entry[1] or "" for entry in entries}
        for response in responses
        for code, _, _, name, entries in response.resources
        if code == 0
    }
