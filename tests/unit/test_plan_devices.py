"""Devices and links by name, and a user's own."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import gptworks
from gptworks.cli import plan_options
from gptworks.errors import UsageError
from gptworks.plan.devices import custom_device, device, devices, link

HERE = Path(gptworks.__file__).parent


def test_the_devices_that_are_asked_for_are_there_with_plausible_numbers():
    known = devices()
    assert {"v100-16g", "v100-32g", "a100-40g", "a100-80g", "h100-80g", "cpu"} <= set(known)
    for name, label in {"v100-16g": 16, "v100-32g": 32, "a100-40g": 40, "a100-80g": 80, "h100-80g": 80}.items():
        found = known[name]
        assert 0.95 * label < found.memory / 2**30 < label, "torch reports a little less than the label"
        assert 0 < found.reserved < 0.1 * found.memory
        assert found.capacity == found.memory - found.reserved
        assert found.per_node == 8
    assert known["a100-40g"].peak["bf16"] == 312e12
    assert known["v100-16g"].peak["bf16"] == known["v100-16g"].peak["fp32"], "there are no bf16 units"
    assert known["h100-80g"].bandwidth > known["a100-80g"].bandwidth > known["a100-40g"].bandwidth


def test_the_help_names_every_device():
    assert plan_options.DEVICES.replace(" or ", ", ").split(", ") == [*devices(), "custom"]


def test_every_number_has_a_source():
    table = tomllib.loads((HERE / "plan" / "devices.toml").read_text(encoding="utf-8"))
    for kind in ("devices", "inside", "between"):
        for name, entry in table[kind].items():
            assert len(entry["source"]) > 10, name


def test_the_data_files_are_installed():
    packaging = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = packaging["tool"]["setuptools"]["package-data"]["gptworks"]
    files = sorted(HERE.glob("plan/*.toml"))
    assert [file.name for file in files] == ["devices.toml", "efficiency.toml", "kernels.toml"]
    for file in files:
        assert any(fnmatch(file.relative_to(HERE).as_posix(), pattern) for pattern in patterns), file.name


def test_an_unknown_device_is_refused_with_the_nearest_names():
    with pytest.raises(UsageError, match=r"'v100-32' is unknown. Nearest: v100-32g"):
        device("v100-32")
    with pytest.raises(UsageError, match=r"custom: its numbers are not known.*memory.*tflops"):
        device("custom")


def test_a_custom_device_has_the_numbers_it_is_given():
    own = custom_device(memory=24e9, tflops=165, bandwidth=1008e9, per_node=4)
    assert (own.memory, own.bandwidth, own.per_node, own.name) == (24_000_000_000, 1008e9, 4, "custom")
    assert own.peak == {"fp32": 165e12, "fp16": 165e12, "bf16": 165e12}
    assert own.capacity == 24_000_000_000 - device("a100-80g").reserved, "a context and its like lie there too"
    assert custom_device(memory=24e9, tflops=165, reserved=0).capacity == 24_000_000_000
    half = custom_device(memory=24e9, tflops=156)
    assert half.bandwidth == pytest.approx(device("a100-80g").bandwidth / 2), "of half the FLOP/s"
    with pytest.raises(UsageError, match=r"tflops is -1; needs a number above 0"):
        custom_device(memory=24e9, tflops=-1)


def test_a_link_is_that_of_the_device_where_nothing_else_is_said():
    a100 = device("a100-80g")
    usual = link("", a100)
    assert (usual.name, usual.inside, usual.between) == ("nvlink3+ib-8x200", 300e9, 25e9)
    assert link("ib-400", a100).name == "nvlink3+ib-400"
    assert link("pcie", a100).name == "pcie4+ib-8x200"
    assert link("pcie+eth-10", device("v100-16g")).name == "pcie3+eth-10"
    assert link("nvlink", device("h100-80g")).inside == 450e9
    assert link("nvlink2+ib-100").name == "nvlink2+ib-100"
    with pytest.raises(UsageError, match=r"link 'ib-99': 'ib-99' is unknown. Nearest: ib-"):
        link("ib-99")


def test_a_card_is_shared_by_the_devices_of_its_machine():
    assert link("ib-100", device("v100-16g")).between == 12.5e9 / 8
    alone = custom_device(memory=16e9, tflops=100, per_node=1)
    assert link("ib-100", alone).between == 12.5e9


def test_few_devices_of_a_mesh_of_links_have_few_of_them():
    mesh = link("", device("v100-16g"))
    assert (mesh.near(2), mesh.near(4), mesh.near(8)) == (25e9, 100e9, 150e9)
    switch = link("", device("a100-80g"))
    assert switch.near(2) == switch.near(8) == 300e9
