"""The words of the page in English and Chinese."""

from typing import Literal

Language = Literal["en", "zh"]
"""A language of the page."""

ENGLISH = {
    "language": "en",
    "other_code": "zh",
    "title": "Which response is better?",
    "welcome": "You will see a dialogue and two responses to its last turn. Choose the better one.",
    "blind": "Who wrote which response is hidden, and the sides are drawn at random.",
    "your_name": "Your name",
    "name_note": "It is saved with your choices and stays in this browser.",
    "name_error": "A name has 1 to 64 characters and no control characters.",
    "start": "Start",
    "user": "Human",
    "assistant": "Assistant",
    "system": "System",
    "left": "Response 1",
    "right": "Response 2",
    "tie": "Tie",
    "both_bad": "Both bad",
    "skip": "Skip",
    "undo": "Undo",
    "strength": "How much better? (optional)",
    "slightly": "slightly",
    "clearly": "clearly",
    "remark": "Remark (optional)",
    "guidelines": "Guidelines",
    "keys_title": "Keys",
    "keys_text": "1, 2: that response · 0: tie · b: both bad · s: skip · u: undo · "
    "v, c: slightly, clearly · r: remark, Esc leaves it",
    "progress": "{done} of {total}",
    "minutes_left": "about {minutes} min left",
    "again": "You have seen this comparison before. Please judge it anew.",
    "done_title": "Thank you",
    "done": "There is nothing left for you to label. Your {done} choices are saved.",
    "change_name": "Not {name}?",
    "empty": "(empty)",
    "forbidden_title": "No entry",
    "forbidden": "Open the address that `lit_rlhf label` printed; it holds a token for this page.",
    "not_saved_title": "Not saved",
    "refused": "This form is not one that the page gave to you, or it is too long.",
    "not_saved": "The choice could not be saved: {reason}",
    "not_shown_title": "No comparison now",
    "not_shown": "The page cannot write to its disk: {reason}. Your choices up to here are saved. "
    "Please tell whoever runs this page, and go on later.",
    "back": "Go on",
    "other_language": "中文",
}
CHINESE = {
    "language": "zh",
    "other_code": "en",
    "title": "哪个回答更好？",
    "welcome": "你会看到一段对话，以及对最后一句的两个回答。请选出更好的那个。",
    "blind": "页面不显示回答由谁写成，左右顺序随机决定。",
    "your_name": "你的名字",
    "name_note": "名字会与你的选择一起保存，并留在这个浏览器里。",
    "name_error": "名字须有 1 到 64 个字符，且不含控制字符。",
    "start": "开始",
    "user": "用户",
    "assistant": "助手",
    "system": "系统",
    "left": "回答 1",
    "right": "回答 2",
    "tie": "一样好",
    "both_bad": "都不好",
    "skip": "跳过",
    "undo": "撤销",
    "strength": "好多少？（可不填）",
    "slightly": "略好",
    "clearly": "明显更好",
    "remark": "备注（可不填）",
    "guidelines": "标注准则",
    "keys_title": "按键",
    "keys_text": "1、2：选该回答 · 0：一样好 · b：都不好 · s：跳过 · u：撤销 · "
    "v、c：略好、明显更好 · r：写备注，Esc 离开",
    "progress": "第 {done} / {total} 个",
    "minutes_left": "约剩 {minutes} 分钟",
    "again": "这一对你以前看过，请重新判断。",
    "done_title": "谢谢",
    "done": "没有需要你标注的了。你的 {done} 个选择已保存。",
    "change_name": "不是 {name}？",
    "empty": "（空）",
    "forbidden_title": "不能进入",
    "forbidden": "请打开 `lit_rlhf label` 给出的地址，里面有本页的令牌。",
    "not_saved_title": "没有保存",
    "refused": "这个表单不是本页发给你的，或者太长。",
    "not_saved": "选择没有保存：{reason}",
    "not_shown_title": "暂时没有可标注的",
    "not_shown": "本页无法写入磁盘：{reason}。你到此为止的选择都已保存。"
    "请告诉运行本页的人，稍后再继续。",
    "back": "继续",
    "other_language": "English",
}
WORDS: dict[Language, dict[str, str]] = {"en": ENGLISH, "zh": CHINESE}
"""The words of the page by language."""
OTHER_LANGUAGE: dict[Language, Language] = {"en": "zh", "zh": "en"}


def preferred_language(accept_language: str) -> Language:
    """The first of our languages that a browser's `Accept-Language` names; English without one."""
    for part in accept_language.lower().split(","):
        code = part.strip()[:2]
        if code in ("en", "zh"):
            return "zh" if code == "zh" else "en"
    return "en"
