// The models of the server, with links to the page of each, and back.

import { byId, element, fill } from "./elements.js";

/** Show links to the pages of the models, if the server has several or none answers this page. */
export function showModels(names, isAnswered) {
  byId("models").hidden = names.length < (isAnswered ? 2 : 1);
  byId("form").hidden = !isAnswered;
  byId("back").hidden = !/\/models\/[^/]+\/$/.test(location.pathname);
  fill("model-links", names.map((name) => (
    element("li", {}, element("a", { href: `models/${encodeURIComponent(name)}/` }, name))
  )));
}
