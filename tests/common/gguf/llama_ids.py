"""What llama.cpp makes of texts: run by an interpreter that has llama_cpp, with a GGUF file as the argument.

A request a line on standard input, an answer a line on standard output, both JSON:
{"encode": text, "special": bool} -> ids; {"decode": [id, ...]} -> the bytes in hexadecimal digits of each;
{"ends": true} -> ids that end a generation; {"prompt": text} -> ids with BOS and EOS as the file says.
"""

import json
import sys

import llama_cpp

model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
vocabulary = llama_cpp.llama_model_get_vocab(model._model.model)
num_tokens = llama_cpp.llama_vocab_n_tokens(vocabulary)
buffer = (llama_cpp.llama_token * 100_000)()
piece = bytes(100_000)


def encode(text: str, *, special: bool, prompt: bool = False) -> list[int]:
    content = text.encode()
    number = llama_cpp.llama_tokenize(vocabulary, content, len(content), buffer, len(buffer), prompt, special)
    if number < 0:
        raise ValueError(f"{-number} tokens do not fit")
    return list(buffer[:number])


def decode(id_: int) -> str:
    number = llama_cpp.llama_token_to_piece(vocabulary, id_, piece, len(piece), 0, True)
    return piece[:number].hex()


for line in sys.stdin:
    request = json.loads(line)
    if "encode" in request:
        answer: object = encode(request["encode"], special=request["special"])
    elif "prompt" in request:
        answer = encode(request["prompt"], special=True, prompt=True)
    elif "decode" in request:
        answer = [decode(id_) for id_ in request["decode"]]
    else:
        answer = [id_ for id_ in range(num_tokens) if llama_cpp.llama_vocab_is_eog(vocabulary, id_)]
    sys.stdout.write(json.dumps(answer) + "\n")
