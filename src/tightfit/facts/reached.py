"""What programs really reach of published rates, and what is assumed where nobody describes it.

The one place for it: each number with where it was measured, or with the word "assumed". Every
share is of a nominal figure. `tightfit train` uses none of this: it measures.
"""

from __future__ import annotations

from tightfit.facts.presets import Card, Pcie
from tightfit.units import GIB

# Matrix products of 16-bit and 8-bit numbers, by architecture: nine tenths of the best product that
# was measured, since a model's shapes are not the best ones. Best products:
#   A100 SXM 267.9 of 312, H100 SXM 794.5 of 989, B200 1745 of 2250, MI250X die 147 of 191.5, MI300X
#   781.9 of 1300 (Stas Bekman, Machine Learning Engineering, table of Maximum Achievable Matmul
#   FLOPS); a model's shapes on an H100: 720 of 989 (SemiAnalysis, MI300X vs H100 vs H200, 2024);
#   RTX 4090 159 to 167 of 165.2 (mli/transformers-benchmarks#4); RTX PRO 6000 457.6 of 503.8 and
#   RTX 5090 254 of 209.5, above its published clock (xzwgit/gpu-flops-bench).
# Assumed: Ampere as Ada and less; Volta, Turing (whose T4 is held back by its 70 W) and Ascend.
_PRODUCT_SHARES = {
    "volta": 0.70,
    "turing": 0.60,
    "ga100": 0.77,
    "ampere": 0.82,
    "ada": 0.87,
    "hopper": 0.72,
    "blackwell": 0.70,
    "rtx-blackwell": 0.82,
    "cdna2": 0.69,
    "cdna3": 0.54,
    "da-vinci": 0.60,
}
# fp32 on ordinary cores: 45.5 of 60.3 (an H100 NVL), 83.2 of 104.8 (RTX 5090, gpu-flops-bench),
# 86.7 of 82.6 (RTX 4090, transformers-benchmarks#4); nine tenths of the least.
_FP32_SHARE = 0.68
# Copies inside a card: 918 of 1008 GB/s (RTX 4090, tinygrad/open-gpu-kernel-modules#6), 3568 of
# 3938 (an H100 NVL), 1488 of 1792 (RTX 5090) and 1416 of 1792 (RTX PRO 6000, voipmonitor/rtx6kpro).
MEMORY_SHARE = 0.85
# Copies between pinned host memory and a card, of one direction: 12 of 15.75 GB/s (V100,
# ZaidQureshi/bam#54), 24 to 26 of 31.5 (RTX 4090, NVIDIA/nvbandwidth#15), 52.8 (H100,
# NVIDIA/nvbandwidth#24) and 56.3 of 63.0 (RTX 5090, tinygrad/open-gpu-kernel-modules#29).
_PCIE_SHARES = {3: 0.76, 4: 0.80, 5: 0.86}
# Cards that cannot read each other's memory send through the host's: 12.9 GB/s each way while both
# ways are busy, where a copy to the host runs at 25.5 (RTX 4090, open-gpu-kernel-modules#6).
THROUGH_HOST_SHARE = 0.5
# NCCL reckons with 235 of 300 GB/s on an A100's NVLink (src/graph/tuning.cc).
FABRIC_SHARE = 0.78
# Assumed: frames, headers and acknowledgements; 0.94 is the most for TCP in frames of 1500 bytes.
NETWORK_SHARE = 0.9

# One hop of a ring, as NCCL reckons with it (src/graph/tuning.cc, hwLat, ring, Simple).
FABRIC_SECONDS = 3.4e-6
PCIE_SECONDS = 5.7e-6
_NETWORK_SECONDS = 9.6e-6
# Assumed: slower networks are Ethernet without RDMA, where the kernel handles every message.
_SLOW_NETWORK_SECONDS = 30e-6
_RDMA_FROM_BYTES_PER_SECOND = 100e9 / 8

# Starting one operation from Python: 4.2 microseconds were measured with an H100 NVL's host.
OPERATION_SECONDS = 5e-6

# AdamW in fp32 reads the parameter, its gradient and two moments, and writes all but the gradient;
# both a card's and a host's fused kernel run at their memory's rate.
OPTIMIZER_BYTES_PER_PARAMETER = 28

# Assumed of hosts that nobody describes: modules as old as the slots, DDR4-3200 (25.6 GB/s a
# channel) up to PCIe 4 and DDR5-4800 (38.4) from PCIe 5; two channels at home, four in a
# workstation, eight per socket in a server, which has a second one for more than four cards.
_CHANNELS = {"consumer": 2, "workstation": 4, "datacentre": 8}
_CARDS_PER_SOCKET = 4
# Assumed: what a program's copies reach of the modules' rate.
HOST_MEMORY_SHARE = 0.75

# Linux keeps 64 bytes about each page of 4096; 2 GiB are assumed for everything else that runs.
_PAGE_SHARE = 64 / 4096
_OTHER_PROGRAMS_BYTES = 2 * GIB


def product_flops_per_second(card: Card, precision: str) -> float | None:
    """What matrix products of a type reach; None where nobody has published a rate for it."""
    nominal = card.flops_per_second.get(precision)
    if nominal is None:
        return None
    return nominal * (_FP32_SHARE if precision == "fp32" else _PRODUCT_SHARES[card.architecture])


def copy_bytes_per_second(pcie: Pcie) -> float:
    """Pinned copies between host and card, in one direction."""
    return pcie.bytes_per_second * _PCIE_SHARES[pcie.generation]


def network_seconds(bytes_per_second: float) -> float:
    """Latency of a network of this nominal rate."""
    fast = bytes_per_second >= _RDMA_FROM_BYTES_PER_SECOND
    return _NETWORK_SECONDS if fast else _SLOW_NETWORK_SECONDS


def assumed_host_memory(card: Card, pcie: Pcie, cards: int) -> float:
    """Nominal bytes a second of the RAM of a machine with these cards and slots."""
    channel = 38.4e9 if pcie.generation >= 5 else 25.6e9
    sockets = 2 if card.kind == "datacentre" and cards > _CARDS_PER_SOCKET else 1
    return channel * _CHANNELS[card.kind] * sockets


def usable_ram(total_bytes: int) -> int:
    """What of a machine's RAM a job can have."""
    return round(total_bytes * (1 - _PAGE_SHARE)) - _OTHER_PROGRAMS_BYTES
