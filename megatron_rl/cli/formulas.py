"""Formulas of the algorithms' page in TeX.

The one idea: docstrings have equations as plain text, which is what a reader of the code wants; the page has
the same equations set as formulas. GitHub renders them from the page, and ``docs/mathml.py`` for the site.
"""

from __future__ import annotations

import re

RATIO_CLIP = r"\operatorname{clip}(r, 1 - \text{clip_low}, 1 + \text{clip_high})"
LOG_RATIO = r"\sum_t (\log p_t - \log p_t^{\text{rollout}})"

FORMULAS: dict[str, str] = {
    # Advantages.
    "A_i = (R_i - mean_g) / (std_g + epsilon)": r"A_i = \frac{R_i - \mu_g}{\sigma_g + \varepsilon}",
    "A = R / (1 + epsilon)": r"A = \frac{R}{1 + \varepsilon}",
    "A_i = sum_k w_k GRPO(r_k)_i": r"A_i = \sum_k w_k \operatorname{GRPO}(r_k)_i",
    "A_i = alpha (R_i - mean_g) / normalizer": r"A_i = \alpha \frac{R_i - \mu_g}{\text{normalizer}}",
    "alpha = B / max(#{R != 0}, 1)": r"\alpha = \frac{B}{\max(\operatorname{count}(R \neq 0), 1)}",
    "A = alpha R": r"A = \alpha R",
    "A_i = (R_i - mean_others) / (std_others + epsilon)": (
        r"A_i = \frac{R_i - \mu_{\text{others}}}{\sigma_{\text{others}} + \varepsilon}"
    ),
    "(R_max - R_second) / (std_g + epsilon)": (
        r"\frac{R_{\text{max}} - R_{\text{second}}}{\sigma_g + \varepsilon}"
    ),
    "A_i = R_i - sum_j l_j R_j / sum_j l_j": r"A_i = R_i - \frac{\sum_j l_j R_j}{\sum_j l_j}",
    "A = R": r"A = R",
    "A_t = G_t - b": r"A_t = G_t - b",
    "A = G": r"A = G",
    "A_t = G_t - B_t": r"A_t = G_t - B_t",
    "B_t = sum_i W_t^i G_t^i / sum_i W_t^i": r"B_t = \frac{\sum_i W_t^i G_t^i}{\sum_i W_t^i}",
    "W_t = sum_(j <= t) (1 - 2 p_j + sum_v p_j(v)^2)": (
        r"W_t = \sum_{j \le t} \left( 1 - 2 p_j + \sum_v p_j(v)^2 \right)"
    ),
    # Divergences of a teacher P and the policy Q.
    "sum P log(P / Q)": r"\sum P \log \frac{P}{Q}",
    "sum Q log(Q / P)": r"\sum Q \log \frac{Q}{P}",
    "beta sum P log(P / M) + (1 - beta) sum Q log(Q / M)": (
        r"\beta \sum P \log \frac{P}{M} + (1 - \beta) \sum Q \log \frac{Q}{M}"
    ),
    "M = beta P + (1 - beta) Q": r"M = \beta P + (1 - \beta) Q",
    "A_i = R_i - mean_(j != i) R_j = n / (n - 1) (R_i - mean_g)": (
        r"A_i = R_i - \frac{1}{n - 1} \sum_{j \neq i} R_j = \frac{n}{n - 1} (R_i - \mu_g)"
    ),
    # Policy losses; sg is the stopped gradient.
    "l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log_prob": (
        rf"l = -\operatorname{{sg}}[{RATIO_CLIP}] \, A \log p"
    ),
    "l = -sg[min(r, ratio_cap)] A log_prob": (
        r"l = -\operatorname{sg}[\min(r, \text{ratio_cap})] \, A \log p"
    ),
    "|p - q|": r"\lvert p - q \rvert",
    "q log(q/p) + (1-q) log((1-q)/(1-p))": (r"q \log \frac{q}{p} + (1 - q) \log \frac{1 - q}{1 - p}"),
    "s = sign A": r"s = \operatorname{sign} A",
    "d_t = log_probs - old_log_probs": r"d_t = \log p_t - \log p_t^{\text{old}}",
    "d'_t = s min(s d_t, s clip(d_t, -clip_low, clip_high))": (
        r"d'_t = s \min(s \, d_t, s \operatorname{clip}(d_t, -\text{clip_low}, \text{clip_high}))"
    ),
    "l = -mean(A) exp(mean_t d'_t)": (r"l = -\operatorname{mean}(A) \exp(\operatorname{mean}_t d'_t)"),
    "s_i = exp(mean_t(log_probs - old_log_probs))": (
        r"s_i = \exp(\operatorname{mean}_t (\log p_t - \log p_t^{\text{old}}))"
    ),
    "sg[s_i] pi_t / sg[pi_t]": r"\operatorname{sg}[s_i] \frac{\pi_t}{\operatorname{sg}[\pi_t]}",
    "max(-A s_i, -A clip(s_i))": r"\max(-A s_i, -A \operatorname{clip}(s_i))",
    "coef |log_probs - old_log_probs|": r"\text{coef} \, \lvert \log p - \log p^{\text{old}} \rvert",
    "l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))": rf"l = \max(-A r, -A {RATIO_CLIP})",
    "l = min(l, -A c)": r"l = \min(l, -A c)",
    "l = -f(r) A": r"l = -f(r) A",
    "f(r) = sigmoid(tau (r - 1)) 4 / tau": (r"f(r) = \frac{4}{\tau} \operatorname{sigmoid}(\tau (r - 1))"),
    "l = -A log_prob": r"l = -A \log p",
    "l = -sg[min(R_i, 1)] A log_prob": r"l = -\operatorname{sg}[\min(R_i, 1)] \, A \log p",
    "R_i = exp(clamp(sum_t (log_probs - rollout_log_probs), +-20))": (
        rf"R_i = \exp(\operatorname{{clamp}}({LOG_RATIO}, \pm 20))"
    ),
    "l = -sg[phi(W)] A log_prob": r"l = -\operatorname{sg}[\varphi(W)] \, A \log p",
    "phi(W) = W^power exp(decay (1 - W))": (r"\varphi(W) = W^{\text{power}} \exp(\text{decay} \, (1 - W))"),
    "W = exp(clamp(sum_t (log_probs - rollout_log_probs), +-20))": (
        rf"W = \exp(\operatorname{{clamp}}({LOG_RATIO}, \pm 20))"
    ),
    "W = power / decay": r"W = \frac{\text{power}}{\text{decay}}",
    # Value losses and distillation.
    "coef max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2)": (
        r"\text{coef} \, \max((v - G)^2, "
        r"(\operatorname{clip}(v, v_{\text{old}} - \text{clip}, v_{\text{old}} + \text{clip}) - G)^2)"
    ),
    "coef (log p_teacher - log p_actor)": (
        r"\text{coef} \, (\log p_{\text{teacher}} - \log p_{\text{actor}})"
    ),
}
"""Equation as a docstring has it, on one line -> its TeX."""

_CODE = re.compile(r"`([^`]+)`")


def with_formulas(text: str) -> str:
    """Return Markdown with the code of equations replaced by formulas, in the notation of GitHub.

    GitHub renders the content of ``$`…`$`` without any other change, such as of underscores.

    Example:
        >>> with_formulas("`A = alpha R` with `alpha`")
        '$`A = \\\\alpha R`$ with `alpha`'
    """

    def formula(match: re.Match[str]) -> str:
        tex = FORMULAS.get(" ".join(match[1].split()))
        if tex is None:
            return match[0]
        return f"$`{tex}`$"

    return _CODE.sub(formula, text)
