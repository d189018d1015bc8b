"""Hosts, leaders, and which process is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpusync.verdict import HostIdentity, Hosts, this_host
from gpusync.verdict.hosts import is_gone, this_process


def host(boot_id: str, local_dir: str = "/ckpt", name: str = "") -> HostIdentity:
    return HostIdentity(boot_id=boot_id, local_dir=local_dir, name=name)


@pytest.mark.parametrize(
    ("identities", "leaders", "leader_of", "beside"),
    [
        ([host("a")], (0,), [0], [(0,)]),
        ([host("a")] * 3, (0,), [0, 0, 0], [(0, 1, 2)] * 3),
        ([host("a"), host("a"), host("b"), host("b")], (0, 2), [0, 0, 2, 2], [(0, 1)] * 2 + [(2, 3)] * 2),
        ([host("b"), host("a"), host("b")], (0, 1), [0, 1, 0], [(0, 2), (1,), (0, 2)]),
        # One machine, two local directories: two hosts.
        ([host("a", "/one"), host("a", "/two")], (0, 1), [0, 1], [(0,), (1,)]),
        # The name says nothing.
        ([host("a", name="x"), host("a", name="y")], (0,), [0, 0], [(0, 1)] * 2),
    ],
)
def test_the_leader_is_the_lowest_rank_on_a_host(identities, leaders, leader_of, beside):
    hosts = Hosts.of(identities)
    ranks = range(len(identities))
    assert hosts.leaders == leaders
    assert [hosts.leader_of(rank) for rank in ranks] == leader_of
    assert [hosts.ranks_beside(rank) for rank in ranks] == beside


def test_this_host_resolves_the_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert this_host(tmp_path / "link") == this_host(tmp_path / "real")
    assert this_host(tmp_path / "link").local_dir == os.path.realpath(tmp_path / "real")
    assert this_host(tmp_path / "not there yet") != this_host(tmp_path / "real")
    assert this_host(tmp_path).boot_id


def test_a_process_is_gone_when_it_has_ended_even_as_a_zombie():
    here = host("a")
    code = "import sys; sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        process = replace(this_process(), pid=child.pid, start=stat[19])
        assert not is_gone(process, host=here, mine=here)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(process, host=here, mine=here)
    finally:
        child.kill()
        child.communicate()
    assert is_gone(process, host=here, mine=here)


def test_a_later_process_of_the_same_number_is_another():
    here = host("a")
    assert not is_gone(this_process(), host=here, mine=here)
    assert is_gone(replace(this_process(), start="1"), host=here, mine=here)


@pytest.mark.parametrize("elsewhere", [{"host": host("b")}, {"namespace": "pid:[1]"}, {"namespace": ""}])
def test_of_other_machines_and_containers_nothing_is_known(elsewhere):
    process = replace(this_process(), start="1", namespace=elsewhere.get("namespace", this_process().namespace))
    assert not is_gone(process, host=elsewhere.get("host", host("a")), mine=host("a"))
