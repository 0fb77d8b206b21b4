// What of the page someone could not read, hear or reach: a list of sentences, empty if it is well.
() => {
  const wrong = [];
  const shown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const named = (element) =>
    element.getAttribute("aria-label") || element.labels?.length || element.textContent.trim() || element.title;
  const words = (element) => element.outerHTML.slice(0, 120);

  for (const element of document.querySelectorAll("a, button, input, canvas, [role=img], [tabindex='0']")) {
    if (shown(element) && !named(element)) wrong.push(`nameless: ${words(element)}`);
  }
  for (const heading of document.querySelectorAll("th")) {
    if (!heading.scope) wrong.push(`a heading of a table without scope: ${words(heading)}`);
  }
  for (const role of ["main", "nav", "header"]) {
    if (!document.querySelector(role)) wrong.push(`no ${role}`);
  }
  if (document.querySelectorAll("h1").length !== 1) wrong.push("not one h1");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id is there twice");
  if (!document.querySelector("[role=status].connection")) wrong.push("the state of the connection is not told");

  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((part) => {
      const value = part / 255;
      return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.nodeValue.trim() || !shown(element) || element.closest("svg, [aria-hidden=true]")) continue;
    const [text, ground] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(2)}: ${words(element)}`);
  }
  return wrong;
}
