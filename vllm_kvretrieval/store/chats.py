"""Chats as a server writes them: by its own template, and its options for it."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from vllm_kvretrieval.compat import default_chat_options
from vllm_kvretrieval.errors import RetrievalConfigError


class ServedChat:
    """Gives the tokens of a chat of one message, as ``vllm serve`` does.

    Args:
        served: The arguments of ``vllm serve``.
        renderer: vLLM's renderer of the engine.
        model: vLLM's configuration of the model.

    Raises:
        RetrievalConfigError: vLLM writes chats of this model without a template.
        ValueError: The template that the arguments name is none.
    """

    def __init__(self, served: Namespace, renderer: Any, model: Any) -> None:
        from vllm.renderers.chat_utils import load_chat_template
        from vllm.utils.mistral import is_mistral_tokenizer

        if model.hf_config.model_type == "gpt_oss":
            raise RetrievalConfigError(
                "store add --chat: vLLM writes the date at the start of every chat of gpt-oss, so "
                "a document would be found on one day alone. Use prompts, and leave --chat out."
            )
        self._renderer, self._model = renderer, model
        self._template = load_chat_template(served.chat_template)
        self._format = served.chat_template_content_format
        by_tokens = is_mistral_tokenizer(renderer.tokenizer) or model.enable_prompt_embeds
        self._defaults = default_chat_options(served) | {"tools": None, "tokenize": by_tokens}

    def __call__(self, text: str) -> list[int]:
        """The tokens of a chat with this message of a user, and what the template puts behind."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[{"role": "user", "content": text}])
        chat = request.build_chat_params(self._template, self._format).with_defaults(self._defaults)
        # No limit: who asks says better which document is too long.
        size = replace(request.build_tok_params(self._model), max_total_tokens=None)
        _, (prompt,) = self._renderer.render_chat([request.messages], chat, size)
        return list(prompt["prompt_token_ids"])
