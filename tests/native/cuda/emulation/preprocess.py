"""Rewrite CUDA syntax that g++ cannot parse into calls of the emulation."""

import re

EXTERN_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\w+\)\s*)?([\w:]+(?:\s+[\w:]+)*)\s+(\w+)\s*\[\s*\]\s*;"
)
SHARED = re.compile(r"__shared__\s+((?:__align__\(\w+\)\s*)?(?:typename\s+)?[\w:]+)\s+(\w[^;{}]*);")
BEFORE_LAUNCH = re.compile(r"(?:\s|\\\n)+(?=\Z)")
NAME_BEFORE = re.compile(r"[\w:]+$")
# ggml's wrapper of a launch, which gets the kernel as an argument.
NAMED_LAUNCH = re.compile(r"(\bggml_cuda_kernel_launch\(\s*)([A-Za-z_]\w*)(?=\s*[<,])")
# MMQ's kernels and configurations exist for 16 tile widths.
TILE_CONFIG = re.compile(r"^\s*CASE\(\w+,\s*\d+,\s*\d+,\s*\d+,\s*(\d+),.*$", re.M)
TILE_CASE = re.compile(r"case\s+(\d+):\s*launch_mul_mat_q<.*?break;", re.S)
TILES = {"8", "32", "128"}
ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")


def emulated(text):
    """Convert the text of a .cu or .cuh file for g++. Line numbers stay the same.

        kernel<<<config>>>(args)      -> moe_emu::config(config).of("kernel", CALL)(args)
                                         CALL: [=](auto... a) { kernel(a...); }
        extern __shared__ T name[];   -> T * const name = (T *) moe_emu::dynamic_shared();
        __shared__ T name[N];         -> struct TYPE { T name[N]; };
                                         auto & name = moe_emu::of_block<TYPE>().name;
        asm(...)                      -> moe_emu::no_ptx()
        ggml_cuda_kernel_launch(name  -> moe_emu::naming("name"), ggml_cuda_kernel_launch(name

    Raises ValueError if a launch cannot be parsed.
    """
    text = EXTERN_SHARED.sub(r"\1 * const \2 = (\1 *) moe_emu::dynamic_shared();", text)
    text = SHARED.sub(_shared, text)
    text = NAMED_LAUNCH.sub(r'moe_emu::naming("\2"), \1\2', _without_asm(text))
    done, at = [], 0
    while (start := text.find("<<<", at)) >= 0:
        if _in_comment(text, start):
            done.append(text[at : start + 3])
            at = start + 3
            continue
        stop = text.index(">>>", start)
        between = BEFORE_LAUNCH.search(text, at, start)
        head = text[at : between.start()] if between else text[at:start]
        kernel = _kernel_at_end(head)
        config = text[start + 3 : stop]
        label = kernel.split("<")[0]
        done += [head[: len(head) - len(kernel)]]
        # In a lambda, template arguments are deduced from the call, as in CUDA.
        call = f"[=](auto... moe_emu_a) {{ {kernel}(moe_emu_a...); }}"
        done += [f'moe_emu::config({config}).of("{label}", {call})']
        done += [between[0]] if between else []
        at = stop + 3
    return "".join([*done, text[at:]])


def fewer_tiles(text):
    """Remove most tile widths from mmq.cuh and its configurations, to compile faster."""

    def keep(match):
        return match[0] if match[1] in TILES else "\n" * match[0].count("\n")

    return TILE_CASE.sub(keep, TILE_CONFIG.sub(keep, text))


def _kernel_at_end(head):
    """Return the kernel's name with its template arguments at the end of `head`."""
    end = len(head)
    if head.endswith(">"):
        depth = 0
        while end > 0:
            end -= 1
            depth += {">": 1, "<": -1}.get(head[end], 0)
            if depth == 0:
                break
    match = NAME_BEFORE.search(head[:end].rstrip())
    if not match:
        raise ValueError(f"no kernel before a launch: ...{head[-80:]}")
    return head[match.start() :]


def _shared(match):
    """Convert shared variables of a block to references into the running block's memory."""
    done = []
    for each in _at_top_level(match[2]):
        name = re.match(r"\w+", each)
        if name is None:
            raise ValueError(f"no name in shared memory: {match[0]}")
        kind = f"moe_emu_of_{name[0]}"
        done.append(f"struct {kind} {{ {match[1]} {each}; }};")
        done.append(f"auto & {name[0]} = moe_emu::of_block<{kind}>().{name[0]};")
    return " ".join(done) + "\n" * match[0].count("\n")


def _at_top_level(text):
    """Split a text at commas outside of brackets."""
    found, depth = [""], 0
    for char in text:
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            found.append("")
        else:
            found[-1] += char
    return [each.strip() for each in found]


def _in_comment(text, at):
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return "//" in line


def _without_asm(text):
    done, at = [], 0
    for match in ASM.finditer(text):
        if match.start() < at:
            continue
        depth, end, quoted = 1, match.end(), False
        while depth:
            char = text[end]
            if char == '"' and text[end - 1] != "\\":
                quoted = not quoted
            elif not quoted:
                depth += {"(": 1, ")": -1}.get(char, 0)
            end += 1
        lines = text.count("\n", match.start(), end)
        done += [text[at : match.start()], "moe_emu::no_ptx()", "\n" * lines]
        at = end
    return "".join([*done, text[at:]])
