"""The coordinator's sessions with servers stay open while TensorFlow's server takes the port."""

from __future__ import annotations

from tfdist_ext.cluster.liveness.sessions import DONE, Servers
from tfdist_ext.cluster.liveness.wire import Endpoint
from tfdist_ext.launch.ports import reserve_ports


def test_a_session_outlives_the_port_and_is_opened_again() -> None:
    with reserve_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        first = Endpoint(address, dict)
        servers = Servers("chief:0", {"ps:0": address})
        first.free_port(session_within=5.0)
        assert first.had_session
        second = Endpoint(address, dict)  # the port is free; as after a restart of the task
        assert first.next_word(0.1) == {}
        first.close()
        second.free_port(session_within=10.0)
        silent = servers.end(DONE)
        assert (silent, second.next_word(1.0)["result"]) == ([], DONE)
        second.close()
