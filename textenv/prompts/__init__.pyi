from .files import load_prompts as load_prompts
from .prompts import (
    Prompt as Prompt,
    PromptList as PromptList,
    check_no_overlap as check_no_overlap,
    split_prompts as split_prompts,
)
