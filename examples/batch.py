"""Answer questions about many documents offline.

    python examples/batch.py MODEL QUESTIONS.jsonl ANSWERS.jsonl --budget 1024

Each line of the input is an object with ``document``, the path of a PDF, text or HTML file, which
begins in the folder of the input, and ``question``. Questions about one document follow each other,
so that it is read once. The output has the same lines in the same order, each with its ``answer``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMError

from vllm_kvretrieval.chat.documents import read_document
from vllm_kvretrieval.doctor.options import refusal
from vllm_kvretrieval.retrieval.model_files import check_model

FIELDS = "document", "question"
MAX_TOKENS = 64


def read_tasks(file: Path) -> list[dict[str, str]]:
    """The lines of the input.

    Raises:
        ValueError: One is no object with ``document`` and ``question``; says which.
    """
    tasks = []
    # Texts in JSON may hold other characters that Python calls ends of lines.
    for number, line in enumerate(read_document(file).text.removesuffix("\n").split("\n"), 1):
        try:
            task = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: is no JSON ({error})") from None
        known = [task.get(name) for name in FIELDS] if isinstance(task, dict) else [None]
        if not all(isinstance(value, str) for value in known):
            raise ValueError(f"{file}, line {number}: has no texts as document and question")
        tasks.append(task)
    return tasks


def read_documents(tasks: Sequence[dict[str, str]], folder: Path) -> dict[str, str]:
    """Texts of the documents, by what tasks call them.

    Args:
        tasks: See :func:`read_tasks`.
        folder: Where their paths begin.

    Raises:
        OSError: One cannot be read.
        ValueError: One is no text; says which.
    """
    texts = dict[str, str]()
    for name in dict.fromkeys(task["document"] for task in tasks):
        texts[name] = read_document(folder / name).text
    return texts


def answer(
    llm: LLM,
    tasks: Sequence[dict[str, str]],
    texts: Mapping[str, str],
    max_tokens: int = MAX_TOKENS,
) -> list[dict[str, str]]:
    """The tasks with their answers, in their order.

    Args:
        llm: An engine for chats.
        tasks: See :func:`read_tasks`.
        texts: See :func:`read_documents`.
        max_tokens: Most tokens of an answer.
    """
    order = sorted(range(len(tasks)), key=lambda number: tasks[number]["document"])
    chats: list[Any] = [
        [{"role": "user", "content": f"{texts[task['document']]}\n\n{task['question']}"}]
        for task in (tasks[number] for number in order)
    ]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=max_tokens))
    texts_of = {number: out.outputs[0].text for number, out in zip(order, outputs, strict=True)}
    return [{**task, "answer": texts_of[number]} for number, task in enumerate(tasks)]


def main() -> int:
    """Answer a file of questions; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="path or name")
    parser.add_argument("questions", type=Path, help="JSON lines; documents are beside it")
    parser.add_argument("answers", type=Path, help="the file to write")
    parser.add_argument("--method", default="kvretrieval")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, help="tokens of the longest context")
    given = parser.parse_args()
    try:
        tasks = read_tasks(given.questions)
        texts = read_documents(tasks, given.questions.parent)
        check_model(given.model)
        given.answers.open("a").close()  # whether it can be written
        llm = LLM(
            given.model,
            max_model_len=given.max_model_len,
            attention_backend=given.method,
            additional_config={"kv_retrieval": {"budget": given.budget}},
        )
        lines = [json.dumps(task) for task in answer(llm, tasks, texts)]
    except (OSError, ValueError, VLLMError) as error:
        print(f"batch: {refusal(error)}", file=sys.stderr)
        return 1
    given.answers.write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
