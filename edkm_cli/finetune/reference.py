"""The uncompressed model that a compressed one learns from: that the two belong together, its text, what it predicts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from edkm_cli import data, models
from edkm_cli.errors import UserError
from edkm_cli.export.run import WrittenText, model_digest
from edkm_cli.finetune.config import FinetuneConfig
from edkm_cli.finetune.session import Session
from edkm_cli.hf import load_source
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.sharded import open_layers
from edkm_cli.integrity import stored_skeleton
from edkm_cli.runtime.palettized import PALETTIZED, PalettizedLinear
from edkm_cli.train.teacher import RememberedTeacher, remember


class Reference:
    """The model that `--reference` names, which is read when it is needed. Raises UserError where the session's model was
    not made of it: another architecture, other shapes, another tokenizer."""

    def __init__(self, config: FinetuneConfig, session: Session):
        self._config, self._session, self._trust = config, session, config.trust_remote_code
        try:
            self._source = models.resolve(config.reference)
            self._architecture = models.load_config(self._source, trust_remote_code=self._trust)
            skeleton = models.skeleton(self._source, self._architecture, trust_remote_code=self._trust)
        except UserError as error:
            raise UserError(str(error).replace("--model", "--reference"), everywhere=True) from error
        compressed = stored_skeleton(session.directory, trust_remote_code=self._trust)
        shapes = {name: tuple(getattr(m, "weight", torch.empty(0)).shape) for name, m in skeleton.named_modules()}
        for name, module in compressed.named_modules():
            if isinstance(module, PALETTIZED):
                linear = isinstance(module, PalettizedLinear)
                shape = (module.out_features, module.in_features) if linear else (module.rows, module.columns)
                if shapes.get(name) != shape:
                    self._refuse(
                        f"has {shapes.get(name, 'nothing')} at {name}, which is {shape} in {session.directory}"
                    )
        tokenizer = models.load_tokenizer(self._source, trust_remote_code=self._trust)
        if tokenizer.get_vocab() != session.tokenizer.get_vocab():
            self._refuse(f"has another tokenizer than {session.directory}")
        self.sha256 = model_digest(self._source, self._architecture, session.world)

    def _refuse(self, why: str) -> None:
        raise UserError(
            f"--reference must be the uncompressed model that DIR was made of, but {self._config.reference} {why}; name "
            "that one, or leave it out",
            everywhere=True,
        )

    def _load(self) -> Any:
        options: dict[str, Any] = {"dtype": self._session.dtype, "device": self._session.world.device}
        return load_source(self._source, dequantize=False, trust_remote_code=self._trust, **options)

    def open(
        self, written_text: WrittenText, unfinished: dict[str, Any] | None, *, tokens: int
    ) -> tuple[Layers, Tensor | None]:
        """(the model, layer by layer where its files can be read so, and the text that it writes where `--data self` asks
        for it, which is among the session's texts then)."""
        session, text = self._session, None
        dtype, device = getattr(torch, session.dtype), session.world.device
        layers = open_layers(self._source, dtype=dtype, device=device, trust_remote_code=self._trust)
        layers = layers or Layers(self._load())
        if session.writes_text:
            options: dict[str, Any] = {"tokens": tokens, "seed": self._config.seed, "watch": session.watch}
            text = written_text.of(unfinished, layers, session.tokenizer, **options)
            session.texts.write(text)
        models.require_finite(self._source, layers)
        return layers, text

    def teacher(self, layers: Layers, blocks: data.Blocks) -> RememberedTeacher:
        """What it predicts of all that training will see, kept on disk."""
        session = self._session
        passing = partial(remember, world=session.world, track=session.watch.track, say=session.watch.say)
        with session.clock.phase("teacher"), layers.at_hand() as whole:
            return passing(whole, blocks, self._config, model_sha256=self.sha256 + models.config_digest(whole.config))
