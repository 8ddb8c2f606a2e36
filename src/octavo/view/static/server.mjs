// Asking the server. Paths are relative to where the page lies: a proxy may have put a prefix before it.

// Throws an `Error` with the server's own words.
export async function ask(path, body) {
  const options = body && {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer.");
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new Error(answer?.error?.message ?? `The server answered with ${response.status}.`);
  return answer;
}

export async function copyLink(button, fragment) {
  const link = new URL(`#${fragment}`, location.href).href;
  const label = (button.dataset.label ??= button.textContent); // it may say something else yet, from the last time
  try {
    await navigator.clipboard.writeText(link);
    button.textContent = "Copied";
  } catch {
    // Not allowed here (no https, say): the address bar has it.
    history.replaceState(null, "", link);
    button.textContent = "See the address";
  }
  setTimeout(() => (button.textContent = label), 1500);
}
