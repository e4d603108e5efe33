"""Changes to GPT-2 that later models have, each as the smallest edits of train_gpt2.py.

`measure.py ideas` trains each of them beside the unchanged script, and test_ideas.py checks that it
resumes exactly. To try one by hand, replace its old texts in a copy of train_gpt2.py by its new ones.
"""

from pathlib import Path
from typing import NamedTuple

SCRIPT = (Path(__file__).resolve().parents[2] / "train_gpt2.py").read_text("utf-8")


class Idea(NamedTuple):
    """A change to the model: its name, who proposed it, and the edits that make it."""

    name: str
    source: str
    edits: dict  # {old text: new text}; each old text occurs once in the script


GPT2 = Idea("GPT-2", "Radford et al. 2019", {})
IDEAS = [
    Idea(
        "rotary positions",
        "Su et al. 2021, arXiv:2104.09864",
        # wpe is deleted, because several GPUs would stop at a parameter that gets no gradient. The
        # sines are made with the block: computing them in each step would slow it. The speeds end
        # at 1/10000, as in modded-nanogpt; those of the paper end one pair earlier
        {
            """            "wpe": nn.Embedding(config.block_size, C),  # position embeddings
""": "",
            """        pos = torch.arange(idx.size(1), device=idx.device)  # (T,)
        # What a token is and where it stands are added up in the same C channels
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
""": """        x = self.transformer.wte(idx)  # (B, T, C)
""",
            """    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
""": """        speeds = 10000 ** -torch.linspace(0, 1, config.n_embd // config.n_head // 2)
        angles = torch.arange(config.block_size)[:, None, None] * speeds  # (T, 1, hs / 2), radians
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:  # (B, T, C) to (B, T, nh, hs)
        a, b = x.unflatten(2, (-1, 2, self.turns.size(-1))).unbind(3)  # channels i and i + hs / 2
        cos, sin = self.turns[:, : x.size(1)]  # pairs turn by angles proportional to the position
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=3).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
""",
            "        q = q.view(": """        q, k = self.rotate(q), self.rotate(k)
        q = q.view(""",
        },
    ),
    Idea(
        "QK-norm",
        "Henry et al. 2020, arXiv:2010.04245",
        {
            "        # This is softmax(q @ k.mT": """        q = F.rms_norm(q, (hs,)).to(v.dtype)  # autocast may return float32
        k = F.rms_norm(k, (hs,)).to(v.dtype)
        # This is softmax(q @ k.mT""",
        },
    ),
    Idea(
        "RMSNorm without gains",
        "Zhang & Sennrich 2019, arXiv:1910.07467",
        # 1e-5 is LayerNorm's eps. Without it, the eps would depend on the dtype
        {
            "self.ln_1 = nn.LayerNorm(config.n_embd)": "self.ln_1 = nn.RMSNorm(config.n_embd, 1e-5, elementwise_affine=False)",
            "self.ln_2 = nn.LayerNorm(config.n_embd)": "self.ln_2 = nn.RMSNorm(config.n_embd, 1e-5, elementwise_affine=False)",
            "nn.LayerNorm(C)": "nn.RMSNorm(C, 1e-5, elementwise_affine=False)",
        },
    ),
    Idea(
        "ReLU squared",
        "So et al. 2021, arXiv:2109.08668",
        {
            """        # GPT-2 was trained with the tanh approximation of GELU
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
""": """        return self.c_proj(F.relu(self.c_fc(x)).square())
""",
        },
    ),
    Idea(
        "SwiGLU",
        "Shazeer 2020, arXiv:2002.05202",
        # Three matrices of 8/3 C * C have as many weights as two of 4 C * C. A c_gate of its own
        # is drawn by its own name, and Muon makes it orthogonal by itself
        {
            """        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)  # 4 C, as in GPT-2
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
""": """        hidden = 64 * round(config.n_embd / 24)  # about 8/3 C
        self.c_fc = nn.Linear(config.n_embd, hidden)
        self.c_gate = nn.Linear(config.n_embd, hidden)
        self.c_proj = nn.Linear(hidden, config.n_embd)
""",
            """        # GPT-2 was trained with the tanh approximation of GELU
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
""": """        return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))
""",
        },
    ),
    Idea(
        "no biases",
        "Chowdhery et al. 2022, arXiv:2204.02311",
        # With one loop for all layers, a layer that another idea adds has no bias either
        {
            "        self.lm_head = nn.Linear(": """        for layer in self.transformer.modules():
            layer.register_parameter("bias", None)
        self.lm_head = nn.Linear(""",
        },
    ),
    Idea(
        "untied head",
        "Chung et al. 2020, arXiv:2010.12821",
        {
            """        # Use one matrix for input and output (Press & Wolf 2017, arXiv:1608.05859): tokens with
        # similar meanings should have similar rows in both, and this saves 39M parameters
        self.lm_head.weight = self.transformer.wte.weight
""": "",
        },
    ),
    Idea(
        "soft cap on the logits",
        "Gemma 2 2024, arXiv:2408.00118",
        # The kernel's gradient is that of logits without a cap, so the loss takes the plain path
        {
            """    # Appendix A is faster. To change the loss, delete this `if`, as .github/RECIPES.md explains
    if triton and x.is_cuda and x.dtype == torch.bfloat16:
        return fused_loss(x, weight, targets, V)[0]
    logits = F.linear(x, weight)[:, :V].float()  # (N, V), without the padding
""": """    logits = F.linear(x, weight)[:, :V].float()  # (N, V)
    logits = 30 * torch.tanh(logits / 30)  # between -30 and 30
""",
            "            return self.lm_head(x[:, first:])[..., :V].float()": "            return 30 * torch.tanh(self.lm_head(x[:, first:])[..., :V].float() / 30)",
        },
    ),
    Idea(
        "grouped queries",
        "Ainslie et al. 2023, arXiv:2305.13245",
        {
            "        self.qkv_sizes = [config.n_embd] * 3  # the channels of q, k and v, of all heads": """        # A third of the heads, 4 of 12, for keys and values, or the next divisor below
        third = max(1, self.n_head // 3)
        self.n_kv_head = max(n for n in range(1, third + 1) if self.n_head % n == 0)
        kv_size = self.n_kv_head * config.n_embd // self.n_head
        self.qkv_sizes = [config.n_embd, kv_size, kv_size]  # the channels of q, k and v""",
            "dim=2)  # (B, T, C) each": "dim=2)  # (B, T, C), and fewer channels for k and v",
            "k = k.view(B, T, self.n_head, hs)": "k = k.view(B, T, self.n_kv_head, hs)",
            "v = v.view(B, T, self.n_head, hs)": "v = v.view(B, T, self.n_kv_head, hs)",
            "is_causal=True)": "is_causal=True, enable_gqa=True)",
        },
    ),
    Idea(
        "embeddings of token pairs",
        "Huang et al. 2025, arXiv:2501.16975",
        # A second table has a row for each pair of tokens, which some pairs share. It begins with
        # zeros, as it would otherwise add noise to the many pairs that are rare
        {
            """            "h": nn.ModuleList(""": """            "pairs": nn.Embedding(5 * config.padded_vocab_size, C),
            "h": nn.ModuleList(""",
            """0.0 if name.endswith("bias") else""": """0.0 if name.endswith(("bias", "pairs.weight")) else""",
            "        x = x.to(self.residual_dtype)": """        previous = F.pad(idx[:, :-1], (1, 0))  # (B, T): the token before each token
        rows = self.transformer.pairs.num_embeddings
        x = x + self.transformer.pairs((36313 * idx + 27191 * previous) % rows)
        x = x.to(self.residual_dtype)""",
        },
    ),
    Idea(
        "gated attention",
        "Qiu et al. 2025, arXiv:2505.06708",
        # A head can write nothing, where softmax alone makes it attend to something
        {
            "        self.c_proj = nn.Linear(config.n_embd, config.n_embd)": """        self.c_gate = nn.Linear(config.n_embd, config.n_head)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)""",
            "        y = y.transpose(1, 2).reshape(B, T, C)": """        y = y.transpose(1, 2) * self.c_gate(x).sigmoid()[..., None]  # (B, T, nh, hs)
        y = y.reshape(B, T, C)""",
        },
    ),
]


def change(script: str, edits: dict) -> str:
    """Return the script with other texts."""
    for old, new in edits.items():
        assert script.count(old) == 1, f"the script has {script.count(old)} times {old}"
        script = script.replace(old, new)
    return script
