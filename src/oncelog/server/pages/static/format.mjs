// Formats texts and JSON for display. Nothing here parses HTML.
import { el } from "./dom.mjs";

// Return the nodes of a text in which backticks mark code.
export const formatText = (text) =>
  text.split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));

// Indent a JSON text. Numbers keep their digits, because parsing them would round large ones.
export const formatJson = (text) => {
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g) ?? [];
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  return tokens.reduce((shown, token, index) => {
    if (token === "{" || token === "[") {
      const isEmpty = ["}", "]"].includes(tokens[index + 1]);
      depth += 1;
      return shown + token + (isEmpty ? "" : line());
    }
    if (token === "}" || token === "]") {
      depth -= 1;
      return shown + (["{", "["].includes(tokens[index - 1]) ? "" : line()) + token;
    }
    if (token === ",") return shown + token + line();
    return shown + (token === ":" ? ": " : token);
  }, "");
};
