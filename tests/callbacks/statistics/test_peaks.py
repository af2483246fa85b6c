"""The table of GPUs' peaks: the right row for the names that CUDA reports."""

import torch

from drivetrain.callbacks.statistics.peaks import peak_flops


def test_a_known_gpu_has_its_float16_peak_and_no_other_takes_a_row_whose_name_it_contains():
    tera = {
        "NVIDIA H200": 989.5,
        "NVIDIA H200 NVL": 835.5,
        "NVIDIA GH200 480GB": 989.5,
        "NVIDIA H100 80GB HBM3": 989.5,
        "NVIDIA H100 PCIe": 756.5,
        "NVIDIA H100 NVL": 835.5,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A100-PCIE-40GB": 312,
        "NVIDIA A10": 125,
        "NVIDIA L4": 121,
        "NVIDIA L40S": 362,
        "NVIDIA B200": 2250,
        "Tesla V100-SXM2-32GB": 125,
        "Tesla V100-PCIE-16GB": 112,
        "Tesla T4": 65,
    }
    part = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    others = ["NVIDIA A10G", "NVIDIA GB200", "NVIDIA L40", "NVIDIA A1000", part, ""]
    expected = {**{name: each * 1e12 for name, each in tera.items()}, **dict.fromkeys(others)}
    assert {name: peak_flops(name, torch.float16) for name in expected} == expected


def test_the_dtype_and_tensor_cores_decide():
    assert peak_flops("NVIDIA H200", torch.float32) == 67e12
    assert peak_flops("NVIDIA H200", torch.float32, tf32=True) == 494.5e12
    assert peak_flops("Tesla T4", torch.float32, tf32=True) == 8.1e12
    assert peak_flops("Tesla V100-SXM2-32GB", torch.bfloat16) is None
    assert peak_flops("NVIDIA H200", torch.float64) is None
