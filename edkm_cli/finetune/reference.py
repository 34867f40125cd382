"""The uncompressed model that a compressed one learns from: that the two belong together, and its layers."""

from __future__ import annotations

import torch

from edkm_cli import models
from edkm_cli.errors import UserError
from edkm_cli.export.run import model_digest
from edkm_cli.finetune.session import PackedSession
from edkm_cli.hf import load_source
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.sharded import open_layers
from edkm_cli.integrity import stored_skeleton
from edkm_cli.runtime.palettized import PALETTIZED, PalettizedLinear


class Reference:
    """The model that `--reference` names, which is read when it is needed. Raises UserError where the session's model was
    not made of it: another architecture, other shapes, another tokenizer."""

    def __init__(self, session: PackedSession):
        self._session, self._name, self._trust = session, session.config.reference, session.config.trust_remote_code
        try:
            self._source = models.resolve(self._name)
            architecture = models.load_config(self._source, trust_remote_code=self._trust)
            skeleton = models.skeleton(self._source, architecture, trust_remote_code=self._trust)
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
        self.sha256 = model_digest(self._source, architecture, session.world)

    def _refuse(self, why: str) -> None:
        raise UserError(
            f"--reference must be the uncompressed model that DIR was made of, but {self._name} {why}; name that one, or "
            "leave it out",
            everywhere=True,
        )

    def open(self) -> Layers:
        """The model, layer by layer where its files can be read so."""
        dtype, options = self._session.dtype, {"device": self._session.world.device, "trust_remote_code": self._trust}
        layers = open_layers(self._source, dtype=getattr(torch, dtype), **options)
        layers = layers or Layers(load_source(self._source, dequantize=False, dtype=dtype, **options))
        models.require_finite(self._source, layers)
        return layers
