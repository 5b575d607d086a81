"""Look up the highest number of operations a second that a device promises, for MFU.

The numbers are for dense matrix products in bfloat16, from the vendors' data sheets. NVIDIA's sheets often print the
number with sparsity, which is twice that.
"""

from __future__ import annotations

import torch

__all__ = ["PEAKS", "device_peak"]

PEAKS = {
    "B200": 2250e12,  # NVIDIA Blackwell architecture technical brief, HGX B200
    "H200": 989e12,  # NVIDIA H200 data sheet
    "H100 NVL": 835e12,  # NVIDIA H100 data sheet, as the next two
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,  # NVIDIA A100 data sheet
    "L40S": 362e12,  # NVIDIA L40S data sheet
    "L4": 121e12,  # NVIDIA L4 data sheet
    "A10G": 70e12,  # AWS, for the GPU of its g5 instances
    "A10": 125e12,  # NVIDIA A10 data sheet
    "MI325X": 1307e12,  # AMD Instinct data sheets, as the next two
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # of one of its two dies, each of which is a device
}
"""Operations a second by a word or words of the device's name; the first that is in a name counts."""


def device_peak(device_type: str, name: str | None = None) -> float | None:
    """Return the operations a second of the device that this rank computes on, or None for a device without an entry.

    Args:
        device_type: "cuda", "cpu", ...
        name: The device's name; None to ask the driver.
    """
    if device_type != "cuda":
        return None
    words = f" {name if name is not None else torch.cuda.get_device_name()} ".replace("-", " ")
    return next((peak for key, peak in PEAKS.items() if f" {key} " in words), None)
