"""Errors that the proxy of the drills puts into answers, on the layouts that aiokafka reads."""

import sys
from io import BytesIO
from pathlib import Path

import pytest
from aiokafka.protocol.commit import OffsetCommitResponse_v3
from aiokafka.protocol.group import HeartbeatResponse_v1, JoinGroupResponse_v5
from aiokafka.protocol.produce import ProduceResponse_v8

sys.path.append(str(Path(__file__).parents[2] / "ops" / "kafka"))

from proxy import ApiKey, KafkaError, failed

CORRELATION = b"\0\0\0\7"
ERROR = KafkaError.UNKNOWN_MEMBER_ID
PARTITION = (0, 0, 17, -1, 0, [], None)


@pytest.mark.parametrize(
    ("api_key", "response"),
    [
        (ApiKey.HEARTBEAT, HeartbeatResponse_v1(0, 0)),
        (ApiKey.JOIN_GROUP, JoinGroupResponse_v5(0, 0, 3, "range", "leader", "member", [])),
        (ApiKey.OFFSET_COMMIT, OffsetCommitResponse_v3(0, [("one", [(0, 0), (1, 0)]), ("two", [(0, 0)])])),
        (ApiKey.PRODUCE, ProduceResponse_v8([("one", [PARTITION, PARTITION]), ("two", [PARTITION])], 0)),
    ],
)
def test_every_error_of_an_answer_becomes_the_one_that_is_asked_for(api_key, response):
    """And no other field changes."""
    frame = failed(CORRELATION + response.encode(), api_key, ERROR)
    assert frame[:4] == CORRELATION
    read = type(response).decode(BytesIO(frame[4:]))
    if hasattr(read, "topics"):
        assert {partition[1] for _, partitions in read.topics for partition in partitions} == {ERROR}
    else:
        assert read.error_code == ERROR
    assert len(frame) == 4 + len(response.encode())
