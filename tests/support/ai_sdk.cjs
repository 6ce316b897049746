// Vercel's AI SDK against a server: node ai_sdk.cjs URL PROVIDER; prints what it got as JSON.
const { generateText, generateObject, streamText, stepCountIs, tool } = require("ai");
const { z } = require("zod");

const [url, name] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "x", name: "tiny" };
const models = {
  responses: () => require("@ai-sdk/openai").createOpenAI(options)("tiny"),
  chat_completions: () =>
    require("@ai-sdk/openai-compatible").createOpenAICompatible({
      ...options,
      supportsStructuredOutputs: true,
      includeUsage: true,
    })("tiny"),
  messages: () => require("@ai-sdk/anthropic").createAnthropic(options)("tiny"),
};
const model = models[name]();
const asked = [];
const weather = tool({
  description: "Tell how the weather is in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    asked.push(city);
    return `sunny in ${city}, script: report`;
  },
});
const common = { model, maxRetries: 0, maxOutputTokens: 120 };
const withTools = {
  ...common,
  prompt: "script: call",
  tools: { weather },
  stopWhen: stepCountIs(3),
};

(async () => {
  const whole = await generateText(withTools);
  const streamed = streamText({
    ...withTools,
    onError: ({ error }) => {
      throw error;
    },
  });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  const usage = await streamed.totalUsage;
  const schema = z.object({ text: z.string(), level: z.number().int() });
  // Of a model whose name it does not know it asks for a call of a tool.
  const prompt = name === "messages" ? "script: as-call" : "script: report";
  const made = await generateObject({ ...common, schema, prompt });
  const numTokens = [whole.totalUsage.outputTokens, usage.outputTokens];
  console.log(JSON.stringify({ asked, texts: [whole.text, text], object: made.object, numTokens }));
})();
