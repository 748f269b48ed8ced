"""Chat templates with the features of published models, in our own words, with their special tokens.

Each has the peculiarities of its family: positions of spaces, newlines and end tokens, how tools are offered
and called, and whether the reasoning of earlier turns remains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ChatForm:
    """Chat template with its special tokens; ``ends`` are the end tokens that the model's files name."""

    template: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str | None = None
    tools: bool = False


# Puts the date into the system turn and tools into the first user turn, and trims contents.
LLAMA_3 = ChatForm(
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}"
    "{%- endif %}{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot_id|>' }}"
    "{%- if tools %}{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}"
    "{{- messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for m in messages %}{%- if m.role in ('tool', 'ipython') %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}"
    "{%- elif m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\"name\": \"' + call.name + '\", ' }}"
    "{{- '\"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ("<|eot_id|>", "<|end_of_text|>"),
    bos="<|begin_of_text|>",
    tools=True,
)
# Has a default system message; consecutive tool responses share one user turn.
QWEN_2 = ChatForm(
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content }}{%- else %}{{- 'Be helpful.' }}{%- endif %}{{- '\\n\\n# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- else %}"
    "{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- elif m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' + m.content }}"
    "{{- '\\n</tool_response>' }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ("<|im_end|>", "<|endoftext|>"),
    tools=True,
)
# Keeps the reasoning after the last user message only.
QWEN_3 = ChatForm(
    "{%- set state = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set state.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set content = m.content %}"
    "{%- set thought = m.reasoning_content or '' %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > state.last and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}{{- content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ("<|im_end|>", "<|endoftext|>"),
)
# No generation prompt; every user turn begins with the start token.
LLAMA_2 = ChatForm(
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>"),
    ("</s>",),
    bos="<s>",
)
# Refuses roles that do not alternate.
MISTRAL_1 = ChatForm(
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>"),
    ("</s>",),
    bos="<s>",
)
# Offers tools before the last user message, so earlier text changes with each turn.
MISTRAL_3 = ChatForm(
    "{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}"
    "{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}"
    "{%- for call in m.tool_calls %}{{- {'name': call.function.name, 'arguments': call.function.arguments} "
    "| tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + {'content': m.content} | tojson }}"
    "{{- '[/TOOL_RESULTS]' }}{%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
     "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ("</s>",),
    bos="<s>",
    tools=True,
)  # fmt: skip
# The next turn's role token ends a turn.
GLM_4 = ChatForm(
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}<|assistant|>{{ m.tool_calls[0].function.name }}\n"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% elif m.role == 'tool' %}<|observation|>\n"
    "{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
    tools=True,
)
# Calls the assistant "model"; ``<end_of_turn>`` ends every turn, also the user's.
GEMMA = ChatForm(
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    ("<eos>", "<end_of_turn>"),
    bos="<bos>",
)
# Marks generated text with ``{% generation %}``.
SMOLLM_3 = ChatForm(
    "<|im_start|>system\n## Metadata\n\nToday Date: {{ strftime_now('%d %B %Y') }}\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' }}"
    "{{ m.content.lstrip('\n') }}{{ '<|im_end|>\n' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|end_of_text|>", "<|im_start|>", "<|im_end|>"),
    ("<|im_end|>",),
)
PHI_3 = ChatForm(
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    ("<|endoftext|>", "<|end|>"),
)
PHI_4 = ChatForm(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    ("<|im_end|>", "<|endoftext|>"),
)
DEEPSEEK_3 = ChatForm(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    ("<｜end▁of▁sentence｜>",),
    bos="<｜begin▁of▁sentence｜>",
)
# Removes reasoning from all turns, and opens it in the generation prompt.
DEEPSEEK_R1 = ChatForm(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    DEEPSEEK_3.special,
    DEEPSEEK_3.ends,
    bos=DEEPSEEK_3.bos,
)
ZEPHYR = ChatForm(
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    ("<s>", "</s>"),
    ("</s>",),
    bos="<s>",
)
# All templates of this module by their lower-case names.
FORMS: dict[str, ChatForm] = {
    name.lower(): form for name, form in globals().copy().items() if isinstance(form, ChatForm)
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add ä & <b>",
        "parameters": {"type": "object"},
    },
}


def tokenizer_of(
    form: ChatForm,
    *,
    prefix: tuple[str, ...] = (),
    suffix: tuple[str, ...] = (),
    spaces: bool = False,
) -> Any:
    """Return a byte-level tokenizer with a form's special tokens and template.

    ``prefix`` and ``suffix`` are special tokens that it adds around a text. With ``spaces`` it is a
    character-level tokenizer that puts a space before each piece of text and merges spaces with words, as
    Llama 2's does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    # The merges join a space with the text after it, as SentencePiece models do.
    if spaces:
        merges = [("▁", "4"), ("▁", "▁"), ("▁", "I"), ("▁I", "t"), ("[", "I"), ("▁", "[I"), ("T", "]")]
        texts = [*map(chr, range(33, 127)), "▁", "\n", *(first + second for first, second in merges)]
        vocabulary = {text: number for number, text in enumerate(texts)}
        model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        model.decoder = decoders.Replace("▁", " ")
    else:
        vocabulary = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()

    model.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in form.special])
    if prefix or suffix:
        pattern = " ".join([*prefix, "$A", *suffix])
        ids = [(text, model.token_to_id(text)) for text in {*prefix, *suffix}]
        model.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=ids)

    # The template reads the names of special tokens from the tokenizer.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=form.bos,
        eos_token=form.ends[0],
        pad_token=form.ends[-1],
    )
    tokenizer.chat_template = form.template
    return tokenizer
