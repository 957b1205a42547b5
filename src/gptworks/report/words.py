"""What the page says, in English and in Chinese."""

from html import escape

_WORDS = {
    "live": ("live", "实时"),
    "report": ("Report of training runs", "训练运行报告"),
    "runs": ("Runs", "运行"),
    "language": ("Language", "语言"),
    "log scale": ("logarithmic scale", "对数坐标"),
    "summary": ("Summary", "概要"),
    "curves": ("Curves", "曲线"),
    "loss": ("Loss (nats per token)", "损失（奈特/词元）"),
    "lr": ("Learning rate", "学习率"),
    "grad_norm": ("Norm of the gradient, before clipping", "梯度范数（裁剪前）"),
    "tokens_per_sec": ("Tokens per second", "每秒词元数"),
    "mfu": ("Model FLOPs utilisation (MFU)", "模型算力利用率（MFU）"),
    "loss_scale": ("Loss scale", "损失缩放系数"),
    "memory": ("Peak memory of a rank (bytes)", "单个进程的峰值内存（字节）"),
    "each step": ("training", "训练"),
    "smoothed": ("training, smoothed", "训练（平滑）"),
    "held out": ("held-out", "留出集"),
    "differences": ("What differs between the runs", "各运行之间的差异"),
    "same": ("All settings are the same.", "所有设置都相同。"),
    "configuration": ("Configuration", "配置"),
    "changed": ("Settings that are not the default", "与默认值不同的设置"),
    "all settings": ("All settings", "全部设置"),
    "key": ("setting", "设置项"),
    "value": ("value", "值"),
    "environment": ("Environment", "环境"),
    "data": ("Data", "数据"),
    "store": ("store", "数据集"),
    "tokens": ("tokens", "词元数"),
    "documents": ("documents", "文档数"),
    "epochs": ("epochs read", "已读轮数"),
    "checkpoints": ("Checkpoints", "检查点"),
    "step": ("step", "步"),
    "steps": ("steps", "步数"),
    "layout": ("layout", "并行布局"),
    "size": ("size", "大小"),
    "held-out loss": ("held-out loss", "留出集损失"),
    "perplexity": ("perplexity", "困惑度"),
    "lowest at": ("lowest, at step", "最低值所在步"),
    "final loss": ("last loss", "最后的损失"),
    "median speed": ("median tokens/s", "每秒词元数（中位数）"),
    "median": ("median", "中位数"),
    "latest": ("latest", "最新"),
    "best": ("best", "最佳"),
    "events": ("Steps that were not finite", "出现非有限值的步"),
    "no events": ("None.", "无。"),
    "notes": ("What could not be read", "无法读取的内容"),
    "unreadable": ("lines of metrics.jsonl that cannot be read are left out", "行 metrics.jsonl 无法读取，已略去"),
    "nothing": ("not recorded", "没有记录"),
    "run": ("run", "运行"),
    "made": ("Written by gptworks report. This page needs nothing else: it loads nothing and sends nothing.",
             "由 gptworks report 生成。本页自成一体：不加载也不发送任何内容。"),
}  # fmt: skip


def both(key: str, element: str = "span") -> str:
    """The words in both languages, of which the page's style shows one."""
    english, chinese = _WORDS[key]
    return f'<{element} lang="en">{escape(english)}</{element}><{element} lang="zh">{escape(chinese)}</{element}>'


def english(key: str) -> str:
    return _WORDS[key][0]
