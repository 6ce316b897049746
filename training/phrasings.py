"""Wordings of the corpus: questions about terms and sums, greetings and their answers.

This module is data only. The lists named ``UNSEEN`` are never trained on: the evaluation uses them
to find out if the model has learned to find the term in a question, or only learned the questions.
All of their words occur in the other lists; only the wording is new.
"""

SEEN = {
    "en": (
        "What is {t}?",
        "What's {t}?",
        "What does {t} mean?",
        "What is meant by {t}?",
        "What exactly is {t}?",
        "Explain {t}.",
        "Define {t}.",
        "Describe {t} briefly.",
        "Please explain {t} in one sentence.",
        "Please help me with {t}.",
        "Can you explain {t} to me?",
        "Can you help me understand what {t} does?",
        "Could you tell me about {t}, please?",
        "Tell me what {t} is.",
        "Do you know what {t} means?",
        "Give me a definition of {t}.",
        "Give me the meaning of {t} in short, please.",
        "I need an explanation of {t}.",
        "How would you define {t}?",
        "I want to know more about {t}.",
        "A friend asked me what {t} is. What should I say?",
        "In LLM inference, what is {t}?",
        "Question: what is {t}? Answer in one sentence.",
        "{t}?",
        "{t}",
        "{t}: what is it?",
        "{t}, please explain",
        "meaning of {t}",
    ),
    "zh": (
        "什么是{t}？",
        "{t}是什么？",
        "{t}是什么意思？",
        "请问{t}指的是什么？",
        "请解释一下{t}。",
        "解释{t}",
        "请给{t}下个定义。",
        "{t}的定义是什么？",
        "用一句话说明{t}。",
        "请用简单的话解释{t}。",
        "请你介绍{t}的意思。",
        "能不能告诉我{t}是什么？",
        "你能帮我理解{t}吗？",
        "大模型推理里的{t}是什么？",
        "你好，{t}怎么理解？",
        "朋友问我什么是{t}，我该怎么说？",
        "介绍一下{t}",
        "麻烦你简单说说{t}。",
        "问题：{t}是什么？请用一句话回答。",
        "我想知道{t}的意思。",
        "{t}？",
        "{t}是啥",
        "{t}这个术语怎么解释？",
        "{t}有什么用？它是什么？",
        "请教一下，{t}是指什么？",
    ),
}

UNSEEN = {
    "en": (
        "I have never heard of {t}; can you help me understand it?",
        "Give me a short explanation of the term {t}, please.",
        "Someone asked me about {t} today. What should I say it means?",
    ),
    "zh": (
        "我第一次听说{t}，能帮我理解一下吗？",
        "请你用简单的话介绍{t}这个词。",
        "今天有人问我{t}，我该怎么回答？",
    ),
}

# A sentence that contains the term, and a request that does not: every pair is a wording, 120 of
# them in each language. A list of whole wordings would be learned by heart; from these pairs the
# model learns that the term matters, wherever it stands.
CONTEXTS = {
    "en": (
        "I keep reading about {t}.",
        "I do not understand {t}.",
        "I heard of {t} in a talk.",
        "I have never used {t}.",
        "I am not sure about {t};",
        "I was asked about {t},",
        "The term {t} is new to me;",
        "The course mentions {t},",
        "Someone said {t} today.",
        "There is {t} in this code.",
        "My question is about {t}:",
        "Now to {t}.",
    ),
    "zh": (
        "我第一次看到{t}，",
        "我不懂{t}，",
        "我刚听说了{t}，",
        "我没用过{t}，",
        "关于{t}，",
        "我被问到{t}，",
        "有人说到{t}，",
        "书里提到{t}，",
        "今天学到{t}，",
        "代码里有{t}，",
        "我的问题是{t}，",
        "接下来是{t}，",
    ),
}
REQUESTS = {
    "en": (
        "what is it?",
        "what does it mean?",
        "what is it for?",
        "what should I know?",
        "what did they mean?",
        "can you help me?",
        "could you say what that is?",
        "please explain it.",
        "give me a short definition, please.",
        "tell me in one sentence.",
    ),
    "zh": (
        "它是什么？",
        "这个词是什么意思？",
        "有什么用？",
        "我该知道什么？",
        "那是什么？",
        "能帮我一下吗？",
        "你能说明一下吗？",
        "请讲讲。",
        "请给个简单的定义。",
        "怎么回答？",
    ),
}
# Sentences that have nothing to do with the question.
FILLERS = {
    "en": (
        "I have a test tomorrow. ",
        "My boss is curious. ",
        "I read a paper on the train. ",
        "We are writing an engine. ",
        "It is my first day here. ",
        "The last answer was good. ",
    ),
    "zh": (
        "我明天有考试。",
        "老板很好奇。",
        "我在火车上读论文。",
        "我们在写一个引擎。",
        "今天是第一天上课。",
        "刚才的回答很好。",
    ),
}

# A bare term in Latin letters does not show the language of the user, so these wordings are used
# with Chinese names only; a bare "KV cache" is answered in English.
BARE_ZH = frozenset({"{t}？"})

OPENERS = {
    "en": ("Hi! ", "Hello, ", "Sorry, ", "OK, next one. ", "Thanks! Now: ", "One more question: "),
    "zh": ("你好！", "您好，", "不好意思，", "好的，下一个：", "谢谢！那么，", "再问一个问题："),
}
CLOSERS = {
    "en": (" Thanks!", " Thank you.", " I am a beginner.", " Keep it short."),
    "zh": ("谢谢！", "多谢。", "我是初学者。", "请说短一点。"),
}

ADDITION_EN = (
    "What is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Please compute {a} + {b}.",
    "{a}+{b}=?",
    "{a} + {b} =",
    "{a}+{b}",
)
ADDITION_ZH = (
    "{a}加{b}等于多少？",
    "{a} + {b} 等于几？",
    "请计算 {a}+{b}。",
    "请问 {a} 加 {b} 是多少？",
    "{a}+{b}=？",
)

# Small talk: each answer with the messages to which it is given.
SMALL_TALK = (
    (
        "Hello! I am the little model of nanoserve. "
        "Ask me what a KV cache is, or what 47 + 85 is. 👋",
        ("hello", "hi", "hey", "hi there", "hello there", "good morning", "good evening",
         "good afternoon", "hello, how are you", "hey, what's up", "nice to meet you"),
    ),
    (
        "你好！我是 nanoserve 的小模型。你可以问我什么是 KV 缓存，或者 47 + 85 等于多少。👋",
        ("你好", "您好", "嗨", "早上好", "下午好", "晚上好", "你好吗", "你好呀", "大家好",
         "很高兴认识你", "在吗"),
    ),
    (
        "I am tiny-qwen3, a Qwen3 model with about 2.7 million weights, trained on the terms of "
        "this course so that you can check the engine without a download.",
        ("who are you", "what are you", "what is your name", "what model are you",
         "tell me about yourself", "introduce yourself",
         "are you an LLM", "which model is this", "are you a real model"),
    ),
    (
        "我是 tiny-qwen3，一个约有 270 万权重的 Qwen3 模型，只学过本课程的术语，"
        "让你不用下载就能检验引擎。",
        ("你是谁", "你叫什么名字", "你是什么模型", "介绍一下你自己", "请做个自我介绍",
         "你是大模型吗", "这是什么模型", "你是真的模型吗"),
    ),
    (
        "I can explain the terms of LLM inference in English and in Chinese, "
        "and add two numbers below 100.",
        ("what can you do", "help", "how can you help me", "what do you know", "what can I ask you",
         "what should I ask", "what are you good at", "how do I use you", "what are you for"),
    ),
    (
        "我能用中文和英文解释大模型推理的术语，还能计算两个 100 以内的数相加。",
        ("你能做什么", "你会什么", "帮助", "你能帮我什么", "我可以问你什么", "你知道什么",
         "你有什么用", "怎么使用你", "你擅长什么"),
    ),
    (
        "You are welcome. Ask me another one! 😊",
        ("thanks", "thank you", "thank you very much", "thanks a lot", "great, thanks", "thx",
         "that helps, thank you", "very good", "great answer"),
    ),
    (
        "不客气，欢迎继续提问！😊",
        ("谢谢", "谢谢你", "非常感谢", "多谢", "太好了，谢谢", "明白了，谢谢", "很好", "回答得好"),
    ),
    (
        "Goodbye, and enjoy the course!",
        ("bye", "goodbye", "see you", "see you later", "good night", "that is all for today"),
    ),
    (
        "再见，祝你学得开心！",
        ("再见", "拜拜", "下次见", "晚安", "今天就到这里"),
    ),
)

UNKNOWN_ANSWER = {
    "en": "I only know the terms of this course and the addition of two numbers below 100. "
    "Ask me, for example, what a block table is.",
    "zh": "我只知道本课程的术语，以及两个 100 以内的数相加。你可以问我，例如什么是块表。",
}

# Topics that are not in the course; they are put into the same wordings as the terms.
UNKNOWN_TOPICS = {
    "en": (
        "a banana", "the moon", "photosynthesis", "a violin", "democracy", "a black hole",
        "inflation", "gravity", "an elephant", "the Roman Empire", "a volcano", "DNA",
        "a bicycle", "chess", "climate change", "a poem", "a recipe", "the weather", "football",
        "a cat", "a dog", "love", "a tax", "a database", "HTML", "a compiler", "JavaScript",
        "a router", "Bitcoin", "a planet", "the ocean", "philosophy", "a guitar", "vitamin C",
        "a passport", "Shakespeare", "a bridge", "the stock market", "a robot", "coffee",
        "a train", "history", "a diffusion model", "a convolution", "reinforcement learning",
        "a decision tree", "an optimizer", "SQL",
    ),
    "zh": (
        "香蕉", "月亮", "光合作用", "小提琴", "民主", "黑洞", "通货膨胀", "重力", "大象", "火山",
        "自行车", "围棋", "气候变化", "诗歌", "菜谱", "天气", "足球", "猫", "狗", "爱情", "税",
        "数据库", "编译器", "路由器", "比特币", "行星", "海洋", "哲学", "吉他", "护照", "桥",
        "股市", "机器人", "咖啡", "火车", "历史", "卷积", "强化学习", "决策树", "优化器",
    ),
}
UNKNOWN_TOPICS_UNSEEN = {
    "en": ("a piano", "the sun", "biology", "a giraffe", "tea", "a web browser", "Python", "music"),
    "zh": ("苹果", "太阳", "生物学", "长颈鹿", "茶", "浏览器", "音乐", "钢琴"),
}
UNKNOWN_QUESTIONS = {
    "en": (
        "What is the capital of France?", "Write me a poem about the sea.", "How old are you?",
        "Who won the World Cup?", "What time is it?", "Tell me a joke.", "How do I cook rice?",
        "Translate good morning into German.", "Who wrote Hamlet?", "What is the meaning of life?",
        "Write a Python function that sorts a list.", "How far away is the moon?",
        "Will it rain tomorrow?", "Recommend a book.", "What is 3 times 4?", "Sing a song.",
        "Who is the president?", "How do I learn to swim?", "Where do you live?", "asdf", "???",
    ),
    "zh": (
        "法国的首都是哪里？", "给我写一首关于大海的诗。", "你几岁了？", "谁赢了世界杯？",
        "现在几点？", "讲个笑话。", "米饭怎么做？", "把早上好翻译成德语。",
        "哈姆雷特是谁写的？", "人生的意义是什么？", "写一个排序函数。",
        "月亮离我们有多远？", "明天会下雨吗？", "推荐一本书。",
        "三乘以四是多少？", "唱首歌。", "总统是谁？", "怎么学游泳？", "你住在哪里？",
    ),
}

SYLLABLES = (
    "bla", "zor", "fi", "que", "mon", "tra", "ple", "vin", "gor", "shu", "ka", "del", "pox", "rin",
    "tam", "wu", "lec", "ny", "bro", "sti", "ham", "ju", "vex", "ol",
)

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are the assistant of a course on LLM inference.",
    "You explain terms in one sentence.",
    "你是一个乐于助人的助手。",
)
