"""An agent on OpenAI's own Python client, which comes with vLLM: it streams, and gives up waiting and asks again.

python openai_agent.py     the task as JSON on the input; prints its conversation as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import httpx
import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main() -> None:
    task = json.load(sys.stdin)
    client: Any = openai.OpenAI(timeout=120)  # the environment names the proxy and the episode
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["question"]}]
    for turn in range(3):
        asked = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [TOOL]}
        if turn == 0:
            content, calls = "", []
            for event in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
                for choice in event.choices:
                    content += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
        else:
            if turn == 1:  # no answer is there in a millisecond
                hasty = client.with_options(timeout=httpx.Timeout(120, read=0.001), max_retries=0)
                with contextlib.suppress(openai.APITimeoutError):
                    hasty.chat.completions.create(**asked)
                    raise SystemExit("the answer came before the client gave up")
            message = client.chat.completions.create(**asked).choices[0].message
            content, calls = message.content, message.tool_calls or []
        answer: dict[str, Any] = {"role": "assistant", "content": content or None}
        if calls:
            answer["tool_calls"] = [
                {"id": one.id, "type": "function", "function": one.function.model_dump()} for one in calls
            ]
        messages.append(answer)
        messages += [{"role": "tool", "tool_call_id": one.id, "content": "cold"} for one in calls]
        messages.append({"role": "user", "content": f"Go on, step {turn}."})
    print(json.dumps(messages[:-1]))


if __name__ == "__main__":
    main()
