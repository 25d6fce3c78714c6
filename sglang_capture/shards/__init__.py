"""The dataset: a directory of safetensors shards with one manifest."""

from sglang_capture.shards.check import check_dataset
from sglang_capture.shards.manifest import DatasetError, Manifest, ShardEntry, SpecMismatch, read_manifest
from sglang_capture.shards.reader import CaptureDataset
from sglang_capture.shards.sample import Sample, SampleError, check_sample
from sglang_capture.shards.sampler import BlockShuffle
from sglang_capture.shards.writer import DatasetWriter

__all__ = [
    "BlockShuffle",
    "CaptureDataset",
    "DatasetError",
    "DatasetWriter",
    "Manifest",
    "Sample",
    "SampleError",
    "ShardEntry",
    "SpecMismatch",
    "check_dataset",
    "check_sample",
    "read_manifest",
]
