"""What is known of a card: from itself where it is there, from its name where it is only compiled for."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.mosaic.card import HOPPER, Card, card_for, compute_capability, miscompiled_reason, unsupported_reason


def device(kind: str, capability: str | None = None, **numbers: int) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, **numbers, **({"compute_capability": capability} if capability else {}))


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (device("NVIDIA H200", "9.0", core_count=132), HOPPER),
        (device("NVIDIA H200 141GB HBM3e", num_cores=132), HOPPER),
        (device("NVIDIA H100 PCIe", num_cores=114), Card(True, 232_448, 114)),
        (device("NVIDIA GH200 480GB"), HOPPER),
        (device("NVIDIA B200", "10.0", core_count=148), Card(False, 232_448, 148)),
        (device("NVIDIA GB200", num_cores=152), Card(False, 232_448, 152)),
        (device("NVIDIA B300 SXM6 AC", num_cores=148), Card(False, 232_448, 148)),
        (device("NVIDIA RTX PRO 6000 Blackwell", num_cores=188), Card(False, 101_376, 188)),
        (device("NVIDIA GB10", "12.1", core_count=48), Card(False, 101_376, 48)),
        (device("cpu"), HOPPER),
    ],
    ids=lambda value: getattr(value, "device_kind", ""),
)
def test_a_card(of, expected):
    assert card_for(of) == expected


def test_a_card_that_is_there_is_asked_rather_than_its_name(monkeypatch):
    there = device("NVIDIA H200 of another make", "12.0", core_count=170)
    monkeypatch.setattr(jax, "devices", lambda: [there])
    assert card_for(device(there.device_kind, num_cores=170)) == Card(False, 101_376, 170)


def test_what_is_too_old_or_says_nothing_of_itself():
    assert unsupported_reason(device("NVIDIA H200", "9.0")) is None
    assert unsupported_reason(device("NVIDIA B300", "10.3")) is None
    assert unsupported_reason(device("NVIDIA A100", "8.0")) == "its kernels are for compute capability 9.0 and newer, not 8.0"
    assert "not None" in str(unsupported_reason(device("a GPU")))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0"),
        ("NVIDIA GeForce RTX 5090", "12.0"),
        ("NVIDIA RTX 6000 Ada Generation", "8.9"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("NVIDIA RTX A6000", "8.6"),
        ("NVIDIA GeForce RTX 3090", "8.6"),
        ("Quadro RTX 6000", "7.5"),
    ],
)
def test_cards_that_are_called_rtx_are_told_apart(kind, expected):
    assert compute_capability(device(kind)) == expected


def test_versions_of_cuda_that_miscompile_causal_masks_are_refused():
    assert [miscompiled_reason(version) is None for version in (12070, 12080, 12090, 12091, 13000)] == [True, False, False, True, True]
    assert "CUDA 12.8: use 12.9.1 or newer" in str(miscompiled_reason(12080))
    assert miscompiled_reason() is None
