// Builds requests from the values of an operation's form. These functions have no effects.

// Return the path, headers and body of a request. `values` are lists of strings by parameter.
export const buildRequest = (operation, values, body, token) => {
  let path = operation.path;
  const query = [];
  const headers = {};
  for (const parameter of operation.parameters ?? []) {
    const sent = values[parameter.name] ?? [];
    if (parameter.in === "path") path = path.replace(`{${parameter.name}}`, encodeURIComponent(sent[0] ?? ""));
    else if (parameter.in === "header" && sent.length) headers[parameter.name] = sent[0];
    else query.push(...sent.map((value) => `${encodeURIComponent(parameter.name)}=${encodeURIComponent(value)}`));
  }
  if (query.length) path += `?${query.join("&")}`;
  if (token && operation.security?.length) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = "application/json";
  return { method: operation.method, path, headers, body: body || undefined };
};

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// Return the shell command for a request. The variable TOKEN replaces the credential.
export const toCurl = ({ method, path, headers, body }, origin, isStream) => {
  const parts = [isStream ? "curl -sSN" : "curl -sS"];
  if (method !== "GET") parts.push(`-X ${method}`);
  parts.push(quote(origin + path));
  for (const [name, value] of Object.entries(headers)) {
    parts.push(name === "Authorization" ? '-H "Authorization: Bearer $TOKEN"' : `-H ${quote(`${name}: ${value}`)}`);
  }
  if (body) parts.push(`--data-binary ${quote(body)}`);
  return parts.join(" ");
};
