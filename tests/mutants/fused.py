"""Fused LoRA layers: products, precision, and the calls that are PEFT's."""

from __future__ import annotations

from tests.mutants import Mutant

FUSED = "tests/lora_parallel/adapters/test_fused_lora.py"

KINDS = f"{FUSED}::test_layers_of_every_kind"
CHANGES = f"{FUSED}::test_what_changes_after_the_first_step_is_asked_in_each"

BREAKAGES = [
    Mutant("backward", harm, test, old, new)
    for harm, test, old, new in [
        (
            "The third part of a float32 factor is left out beside a base in bfloat16.",
            f"{FUSED}::test_parts_are_exact",
            "return first, second, (rest - second).bfloat16()",
            "return first, second, torch.zeros_like(second)",
        ),
        (
            "The scaling of LoRA counts twice in the gradient of B.",
            KINDS,
            "dB.mul_(scaling).t()",
            "dB.mul_(scaling * scaling).t()",
        ),
        (
            "The gradient of the input passes through elements that LoRA dropout has dropped.",
            KINDS,
            "into = None if needs_fed else dx",
            "into = dx",
        ),
        (
            "The gradient of A is computed from the input before dropout.",
            KINDS,
            "fed2 = x2 if fed is None else fed.reshape(x2.shape)",
            "fed2 = x2",
        ),
        (
            "An adapter that is disabled, such as in DPO's reference forward, is computed all the same.",
            CHANGES,
            "if layer.disable_adapters or layer.merged_adapters or layer.lora_variant:",
            "if layer.merged_adapters or layer.lora_variant:",
        ),
        (
            "A merged adapter counts twice.",
            CHANGES,
            "if layer.disable_adapters or layer.merged_adapters or layer.lora_variant:",
            "if layer.disable_adapters or layer.lora_variant:",
        ),
        (
            "A hook on a part of a LoRA layer is not called.",
            CHANGES,
            'return has_hooks(module) or "forward" in module.__dict__',
            'return "forward" in module.__dict__',
        ),
        (
            "A hook of all modules is not called for the parts of a LoRA layer.",
            f"{FUSED}::test_hooks_of_all_modules_are_called",
            "or has_global_hooks():",
            "or False:",
        ),
        (
            "The branch is added into what a hook of a quantised base has kept.",
            f"{FUSED}::test_a_hook_of_a_quantised_base_keeps_what_the_base_computes",
            "if has_hooks(base):",
            "if False:",
        ),
        (
            "Selective recomputation adds the branch twice.",
            f"{FUSED}::test_selective_recomputation_gives_back_a_product_without_its_branch",
            "return torch.mm(a, b, out=into) if bias is None else torch.addmm(bias, a, b, out=into)",
            "return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)",
        ),
        (
            "A bias that a property computes, or that is a buffer, is left out.",
            CHANGES,
            'return own["_parameters"][key] if key in own["_parameters"] else getattr(module, key)',
            'return own["_parameters"].get(key)',
        ),
        (
            "The scaling of LoRA is left out of a single token of `generate`.",
            f"{FUSED}::test_one_token_splits_no_factors",
            "lora_B, addend), alpha=scaling)",
            "lora_B, addend))",
        ),
        (
            "A derivative of the gradient takes what LoRA has kept for a constant.",
            f"{FUSED}::test_derivatives_of_gradients_are_refused",
            'if torch.is_grad_enabled():\n            raise RuntimeError(\n                f"create_graph=True asks',
            'if False:\n            raise RuntimeError(\n                f"create_graph=True asks',
        ),
    ]
]
