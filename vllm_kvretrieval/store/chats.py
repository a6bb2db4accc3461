"""Chats as a server writes them: by its own template, and its options for it."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm_kvretrieval.compat import default_chat_options
from vllm_kvretrieval.errors import RetrievalConfigError


@contextmanager
def _refused() -> Iterator[None]:
    """Turn what vLLM refuses within the block into errors that a command prints."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (VLLMValidationError, ValueError) as error:
        raise RetrievalConfigError(f"store add --chat: {error}") from None


class ServedChat:
    """Chats of one message, as ``vllm serve`` writes them.

    Args:
        served: The arguments of ``vllm serve``.

    Raises:
        RetrievalConfigError: The template that they name is none.
    """

    def __init__(self, served: Namespace) -> None:
        from vllm.renderers.chat_utils import load_chat_template

        with _refused():
            self._template = load_chat_template(served.chat_template)
        self._format = served.chat_template_content_format
        self._defaults = default_chat_options(served)

    def tokens(self, renderer: Any, model: Any, text: str) -> list[int]:
        """The tokens of a chat, with what the template puts behind the message.

        Args:
            renderer: vLLM's renderer of the engine.
            model: vLLM's configuration of the model.
            text: The message, a user's.

        Raises:
            RetrievalConfigError: vLLM has no template for this model, or needs none.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.utils.mistral import is_mistral_tokenizer

        if model.hf_config.model_type == "gpt_oss":
            raise RetrievalConfigError(
                "store add --chat: vLLM writes the date at the start of every chat of gpt-oss, so "
                "a document would be found on one day alone. Use prompts, and leave --chat out."
            )
        by_tokens = is_mistral_tokenizer(renderer.tokenizer) or model.enable_prompt_embeds
        defaults = self._defaults | {"tools": None, "tokenize": by_tokens}
        request = ChatCompletionRequest(messages=[{"role": "user", "content": text}])
        chat = request.build_chat_params(self._template, self._format).with_defaults(defaults)
        # No limit: who asks says better which document is too long.
        size = replace(request.build_tok_params(model), max_total_tokens=None)
        with _refused():
            _, (prompt,) = renderer.render_chat([request.messages], chat, size)
        return list(prompt["prompt_token_ids"])
