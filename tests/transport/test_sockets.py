"""Listening sockets, and the origin of a connection."""

import pytest

from knnper.transport.sockets import origin_of


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_addresses_of_one_origin(host: str, origin: str) -> None:
    assert origin_of(host) == origin
