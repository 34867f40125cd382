"""TRL's SFTTrainer on a packed model. Runs where TRL is installed (the extra `trl`)."""

import pytest

pytest.importorskip("trl")

import datasets
import torch
from peft import LoraConfig, PeftModel
from trl import SFTConfig, SFTTrainer

import edkm_cli
from helpers import byte_tokenizer, cluster, export, tiny_llama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_steps_of_sft_train_an_adapter_that_comes_back(tmp_path, ids, dtype):
    packed = export(*cluster(tiny_llama()), tmp_path / "packed")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<eos>"
    trainer = SFTTrainer(
        model=edkm_cli.load(packed, dtype=dtype),
        args=SFTConfig(
            str(tmp_path / "out"),
            max_steps=2,
            report_to=[],
            use_cpu=True,
            bf16=False,
            max_length=64,
            save_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_list([{"text": "One text.\n"}, {"text": " Another, with ü."}]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    updates = [parameter for name, parameter in trainer.model.named_parameters() if "lora_B" in name]
    assert len(updates) == 14
    assert all(parameter.abs().sum() > 0 for parameter in updates)
    trainer.model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(edkm_cli.load(packed, dtype=dtype), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, trainer.model.eval()(ids).logits)
